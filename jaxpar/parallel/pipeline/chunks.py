"""How a pipeline stage selects the chunk of layers for its next action.

All stages execute one program, but at each tick every stage may run a different chunk or be idle.

    BranchedChunks  One branch per chunk, and one for idle slots. Matmuls read weights and update
                    gradient sums in place, and idle stages compute nothing. For layers without
                    stage-wide collectives; collectives over tensor stay within a stage.
    IndexedChunks   Stacked arrays, from which an index copies the weights of one chunk. All stages
                    enter every collective, as stage-wide permutes require, and the results of idle
                    stages are masked. (Gathers of weights could use branches; not tried.)
    SingleChunk     Like IndexedChunks, for stages of one chunk.

In the `Chunks` protocol, `run` runs an action in its chunk, and `backward` adds a chunk's gradients
to the sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel import vjp_segments
from jaxpar.parallel.pipeline.schedules import PipelineSchedule
from jaxpar.parallel.staged_model import StagedModel, add_gradients, take


class Chunks(Protocol):
    """A stage's chunks of layers."""

    @property
    def first(self) -> Any:
        """The weights of some chunk, for shapes."""

    def run(self, i: jax.Array, c: jax.Array, fn: Callable, idle: Callable) -> Any:
        """Return `fn(weights of chunk c, c)` for the i-th action of this stage.

        Args:     i: outside [0, num_actions) in an idle slot. c: may differ between stages; `fn`
                  receives a Python int if the value is static. idle: called in idle slots, unless
                  `fn` is called there and its result masked.
        """

    def backward(
        self, sums: Any, vjps: list[Any], g: jax.Array, context: Any, chunk: Any, c: Any
    ) -> tuple[Any, jax.Array]:
        """Add chunk c's gradients to the sums. Return the sums and the gradient of its input."""

    def sums_like(self, weights: tuple) -> Any:
        """Return arrays with the shapes of the gradient sums, from a tuple of trainable chunks."""

    def unstacked(self, sums: Any, virtual: int) -> tuple:
        """Convert gradient sums to a tuple of chunks."""


@dataclass(frozen=True)
class SingleChunk:
    """The single chunk of a stage, computed at every tick."""

    model: StagedModel
    weights: tuple

    @property
    def first(self) -> Any:
        return self.weights[0]

    def run(self, i: jax.Array, c: jax.Array, fn: Callable, idle: Callable) -> Any:
        return fn(self.weights[0], 0)

    def backward(self, sums, vjps, g, context, chunk, c):
        own, dx = vjp_segments.backward(self.model, chunk, sums[c], vjps, g, context)
        return (*sums[:c], own, *sums[c + 1 :]), dx

    def sums_like(self, weights: tuple) -> Any:
        return weights

    def unstacked(self, sums: Any, virtual: int) -> tuple:
        return sums


@dataclass(frozen=True)
class BranchedChunks(SingleChunk):
    """One branch per chunk around everything that it computes, and one for idle slots."""

    schedule: PipelineSchedule

    def run(self, i: jax.Array, c: jax.Array, fn: Callable, idle: Callable) -> Any:
        work = [partial(fn, chunk, k) for k, chunk in enumerate(self.weights)]
        at_work = (i >= 0) & (i < self.schedule.num_actions)
        return lax.switch(jnp.where(at_work, c, len(work)), [*work, idle])


@dataclass(frozen=True)
class IndexedChunks:
    """Chunks in stacked arrays [v, ...], selected by a traced index."""

    model: StagedModel
    stacked: Any

    @property
    def first(self) -> Any:
        return take(self.stacked, 0)

    def run(self, i: jax.Array, c: jax.Array, fn: Callable, idle: Callable) -> Any:
        return fn(take(self.stacked, c), c)

    def backward(self, sums, vjps, g, context, chunk, c):
        d_chunk, dx = vjp_segments.pull_back(self.model, 0, chunk, vjps[0], g, context)
        add = lambda total, part: total.at[c].add(part.astype(jnp.float32))  # noqa: E731
        return add_gradients(sums, d_chunk, add), dx

    def sums_like(self, weights: tuple) -> Any:
        return stacked(weights)

    def unstacked(self, sums: Any, virtual: int) -> tuple:
        return tuple(take(sums, k) for k in range(virtual))


def chunks_of(model: StagedModel, weights: tuple, schedule: PipelineSchedule) -> Chunks:
    """Return the implementation of `Chunks` that this model's layers allow."""
    if not model.stage_wide_collectives:
        return BranchedChunks(model, weights, schedule)
    if schedule.virtual > 1:
        return IndexedChunks(model, stacked(weights))
    return SingleChunk(model, weights)


def stacked(weights: tuple) -> Any:
    """Stack chunks along a new leading dim."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights)
