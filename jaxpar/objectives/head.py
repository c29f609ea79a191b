"""What the heads of objectives have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.execution.decisions import Execution
from jaxpar.model.loss import LossWeights
from jaxpar.parallel.collectives import psum
from jaxpar.parallel.staged_model import Sums
from jaxpar.sharding.axes import TOKEN_AXES
from jaxpar.sharding.batch import IGNORED, Batch

__all__ = ["Head", "Sums", "Tree", "count_labels"]

type Tree = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """What the head of a step knows beside weights, residual stream and microbatch."""

    ex: Execution
    weights: LossWeights
    """Weights of losses in addition to the cross entropy."""
    context_of: Callable[[Batch], Any]
    max_segments: int | None
    trains: bool
    """False for the head of an evaluation."""
    mean: jax.Array | None = None
    """The loss of the global batch, if a forward has computed it (`Objective.count`)."""

    @property
    def cfg(self) -> Config:
        return self.ex.cfg


def count_labels(batch: Batch, axes: tuple[str, ...] = TOKEN_AXES) -> jax.Array:
    """Count the labeled tokens of the global batch, float32: exact up to 2**24, 16 million.

    Args:     axes: those over which its tokens are split.
    """
    own = jnp.sum(batch.labels != IGNORED, dtype=jnp.int32)
    return psum(own, axes).astype(jnp.float32)
