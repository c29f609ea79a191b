"""Reads the parameters of a run or of a published model."""

from pathlib import Path
from typing import Any

from jaxpar.config import Config
from jaxpar.inference.load import load_params_of


def load(folder: str | Path, step: int | None = None) -> tuple[Any, Config]:
    """Load parameters onto one device, with adapters merged into them.

    Args:     folder: of a run, or of a published model. step: of the run's checkpoint; None: the
              latest intact one.
    Returns:  the parameters, as `init` returns them, and the config, whose `model` they are of.
    Raises:   ConfigError if the folder contains no model; Damaged if the checkpoint is.
    """
    found = load_params_of(str(folder), step, 1, lambda text: None)
    return found.params, found.cfg
