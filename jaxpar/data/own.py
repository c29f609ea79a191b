"""Batches of users: `DataSource`, a function of seed and step. Imports no JAX."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxpar.config import Config, ConfigError
from jaxpar.config.values import Value

if TYPE_CHECKING:
    from jaxpar.sharding.batch import Batch

#: The arrays of a batch that a source may return.
ARRAYS = ("tokens", "labels", "segment_ids", "positions")


class DataSource(Value):
    """Training batches as a function of seed and step: a value of `data.source`.

    A run that resumes, on any mesh and number of processes, gets the same batches. Each process
    computes the global batch, and keeps its rows.
    """

    kind: ClassVar[str] = "DataSource"
    refuses: ClassVar[dict[str, str]] = {
        "data.mixture": "the source mixes by itself",
        "data.length_schedule": "its sequences have one length",
        "distill.cache": "the cache is of the sequences of a dataset",
        "dpo.beta": "pairs of responses are of a dataset",
        "train.num_epochs": "the source has no epochs",
    }

    def check(self, cfg: Config, path: str) -> None:
        if cfg.train.loss is not None and cfg.train.loss.reads:
            rule = f"has no {cfg.train.loss.reads[0]}, which train.loss reads"
            raise ConfigError(path, type(self).__name__, rule, "use data.mixture")

    def __call__(self, seed: int, step: int, shape: tuple[int, int]) -> Any:
        """Return a global batch.

        Args:
            seed: `train.seed`.
            step: from 0; of a run that skips batches, the number of the batch.
            shape: B, sequences of the batch, and T, their tokens.
        Returns:  the text, integers [B, T + 1]: the labels are its next tokens. Or a dict of
                  "tokens", "labels" (-1: none), "segment_ids" (documents, from 1) and "positions"
                  in them, integers [B, T] each; "tokens" and "labels" are needed.
        """
        raise NotImplementedError


def checked(source: DataSource, made: Any, shape: tuple[int, int], cfg: Config) -> "Batch":
    """Return what a source made as a batch of int32 arrays.

    Raises:   ConfigError for other arrays, shapes or tokens.
    """
    from jaxpar.sharding.batch import Batch

    rows, length = shape
    if not isinstance(made, Mapping):
        text = np.asarray(made)
        _require(source, text, "the text", (rows, length + 1))
        made = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    if not {"tokens", "labels"} <= made.keys() <= set(ARRAYS):
        rule = f"returns the arrays {', '.join(made)}"
        fix = f"return tokens and labels, and no others than {', '.join(ARRAYS)}"
        raise ConfigError("data.source", type(source).__name__, rule, fix)
    place = np.broadcast_to(np.arange(length), shape)
    arrays: dict[str, Any] = {"segment_ids": np.ones(shape), "positions": place} | dict(made)
    for name, a in made.items():
        _require(source, np.asarray(a), name, shape)
    for name in ("tokens", "labels"):
        low, high = np.min(arrays[name]), np.max(arrays[name])
        if low < -(name == "labels") or high >= cfg.model.vocab_size:
            rule = f"returns {name} from {low} to {high}"
            fix = f"return ids below model.vocab_size = {cfg.model.vocab_size}"
            raise ConfigError("data.source", type(source).__name__, rule, fix)
    arrays = {name: np.asarray(a, np.int32) for name, a in arrays.items()}
    return Batch(**arrays)


def _require(source: DataSource, a: np.ndarray, name: str, shape: tuple[int, int]) -> None:
    if a.shape != shape or not np.issubdtype(a.dtype, np.integer):
        rule = f"returns {name} as {a.dtype} {list(a.shape)}"
        fix = f"return integers {list(shape)}"
        raise ConfigError("data.source", type(source).__name__, rule, fix)
