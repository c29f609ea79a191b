"""Loads configs, models and metrics, and generates text, in Python."""

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.api.arguments import check_generation, require_type, texts
from jaxpar.config import Config, ConfigError, config_file, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.rules.paths import with_paths
from jaxpar.config.validate import check
from jaxpar.config.values import FIELDS
from jaxpar.convert.shape import model_from
from jaxpar.inference.load import LoadedModel, load
from jaxpar.inference.options import Sampling
from jaxpar.inference.sample import continuations
from jaxpar.monitoring.outline import outline
from jaxpar.training.vocabulary import with_vocabulary


def load_config(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Load and check a config, as `python -m jaxpar.train NAME --section.field value ...` does.

    Args:     name: of a config that comes with jaxpar, of a .py file, or of a run folder.
              overrides: values by field: {"train.num_steps": 100, "parallel.data": 2}. Those of
              your own classes are taken as they are: {"train.loss": Focal()}.
    Raises:   ConfigError that names the field, its value, the rule and a fix.
    """
    require_type("CONFIG", name, (str, Path), "the name of a config", '"quickstart"')
    texts([str(name)], "CONFIG", '"quickstart"')
    overrides, fix = {} if overrides is None else overrides, 'overrides={"train.num_steps": 100}'
    require_type("overrides", overrides, Mapping, "values by field", fix)
    texts([*overrides, *map(str, overrides.values())], "overrides", fix)
    own = {n: v for n, v in overrides.items() if n in FIELDS and not isinstance(v, str)}
    args = [f"--{path}={value}" for path, value in overrides.items() if path not in own]
    cfg = parse_overrides(config_file.load_config(str(name)), args, model_from=model_from)
    cfg = with_paths(with_vocabulary(replace(cfg, **own)))
    check(cfg)
    return cfg


def load_model(folder: str | Path, step: int | None = None, *, tensor: int = 1) -> LoadedModel:
    """Load the model of a run or of a published folder, for `generate`. Starts JAX.

    Args:     step: of the run's checkpoint; None: the latest intact one. tensor: tensor-parallel
              devices.
    Raises:   ConfigError if the folder contains no model; Damaged if the checkpoint is.
    """
    _require_folder("folder", folder)
    if step is not None:
        require_type("step", step, int, "the step of a checkpoint, or None", "step=100")
    require_type("tensor", tensor, int, "a number of devices", "tensor=1")
    say = functools.partial(print, file=sys.stderr, flush=True)
    return load(str(folder), step, tensor, say)


def generate(
    model: LoadedModel,
    prompt: str | Sequence[str],
    max_tokens: int = 100,
    sampling: Sampling = Sampling(),  # noqa: B008, a constant
    stop: Sequence[str] = (),
) -> Any:
    """Generate the continuation of a prompt, or of a batch of prompts.

    Args:     model: from `load_model`. stop: tokens that end a text, in addition to the end of
              text.
    Returns:  the new text; a list of texts for several prompts.
    Raises:   ConfigError for a value that cannot work.
    """
    require_type("model", model, LoadedModel, "a model", "jaxpar.load_model(RUN)")
    prompts = check_generation(prompt, max_tokens, sampling, stop)
    texts = continuations(model, prompts, sampling, max_tokens, stop)
    return texts[0] if isinstance(prompt, str) else texts


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the records of RUN/metrics.jsonl that belong to a step, without those that a later
    attempt repeated.

    Raises:   ConfigError if there is no such file.
    """
    _require_folder("run_dir", run_dir)
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError("run_dir", str(run_dir), "has no metrics.jsonl", "use a run's folder")
    return [record for record in outline(path).records() if "step" in record]


def _require_folder(name: str, value: str | Path) -> None:
    require_type(name, value, (str, Path), "the path of a folder", '"runs/NAME"')
    texts([str(value)], name, '"runs/NAME"')
