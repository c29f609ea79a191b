"""The length of a run in passes over its training text."""

import math

from jaxpar.config import Config, replace
from jaxpar.data.formats.meta import TRAIN
from jaxpar.data.packing import num_sequences
from jaxpar.data.sources import open_sources


def with_epochs(cfg: Config) -> Config:
    """Set `train.num_tokens` to those of `train.num_epochs` passes, in place of it.

    The last pass may be a part of one. Sequences are whole.

    Raises:   ConfigError when the data cannot be opened.
    """
    if not cfg.train.num_epochs:
        return cfg
    (source,) = open_sources(cfg, TRAIN)
    each = num_sequences(source.dataset.num_tokens, cfg.data.seq_len)
    tokens = max(math.ceil(cfg.train.num_epochs * each), 1) * cfg.data.seq_len
    return replace(cfg, **{"train.num_epochs": 0.0, "train.num_tokens": tokens})
