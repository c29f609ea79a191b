"""The size of the vocabulary, from the training data."""

import math
import sys

from jaxpar.checkpoint.saved import read_saved, saved_steps
from jaxpar.config import Config, ConfigError, flag, replace
from jaxpar.data.formats.meta import TRAIN
from jaxpar.data.sources import open_sources

#: The size is a multiple of this: what matmuls are fast at, and most meshes divide.
MULTIPLE = 128

_PATH = "model.vocab_size"


def with_vocabulary(cfg: Config) -> Config:
    """Set `model.vocab_size` to that of the training data if it is 0, and print what was chosen.

    A run with a checkpoint keeps the size that it has, whatever the mesh.

    Raises:   ConfigError when the data cannot be opened, or the weights of `run.init_from` decide.
    """
    if cfg.model.vocab_size:
        return cfg
    if steps := saved_steps(cfg.run.dir):
        size = read_saved(cfg.run.dir, steps[-1]).config["model"]["vocab_size"]
        return _chosen(cfg, size, f"that of the run in {cfg.run.dir}")
    if cfg.run.init_from:
        rule = f"must be that of the weights in run.init_from = {cfg.run.init_from}"
        raise ConfigError(_PATH, 0, rule, f"use {flag(_PATH)} with the size of that model")
    sizes = {one.dataset.vocab_size: one.dataset.name for one in open_sources(cfg, TRAIN)}
    needed = max(sizes)
    of = math.lcm(MULTIPLE, max(cfg.parallel.tensor * cfg.parallel.pipeline, 1))
    size = -(-needed // of) * of
    return _chosen(cfg, size, f"the {needed:,} tokens of {sizes[needed]}, in multiples of {of}")


def _chosen(cfg: Config, size: int, why: str) -> Config:
    print(f"vocabulary {size:,}: {why}", file=sys.stderr, flush=True)
    return replace(cfg, **{_PATH: size})
