"""How a pipeline stage reaches the chunk of layers that its next action computes.

All stages execute one program, but at each tick each may be at another of its chunks, or idle.

    BranchedChunks  a branch for each chunk, and one for idle slots. Matmuls read weights, and add
                    to gradients, where they lie, and idle stages rest. For layers without
                    stage-wide collectives: those over tensor run within a stage.
    IndexedChunks   stacked arrays; an index copies the weights of one chunk out. All stages enter
                    every collective, as stage-wide permutes require; what an idle stage computes
                    is masked. (Gathers of weights could use branches; not tried.)
    SingleChunk     as IndexedChunks, for stages of one chunk.

The protocol: `run` an action in its chunk, `backward` adds a chunk's gradients to its sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel import vjp_segments
from jaxpar.parallel.pipeline.schedules import Schedule
from jaxpar.parallel.staged_model import StagedModel, add_gradients, take


class Chunks(Protocol):
    """A stage's chunks of layers."""

    @property
    def first(self) -> Any:
        """The weights of some chunk, for shapes."""

    def run(self, i: jax.Array, c: jax.Array, fn: Callable, idle: Callable) -> Any:
        """`fn(weights of chunk c, c)`, for the i-th action of this stage.

        Args:     i: outside [0, num_actions) in an idle slot. c: of every stage its own; `fn` gets
                  it as a Python int where it is known. idle: called in idle slots; or `fn` is, and
                  masks hide its result.
        """

    def backward(
        self, sums: Any, vjps: list[Any], g: jax.Array, context: Any, chunk: Any, c: Any
    ) -> tuple[Any, jax.Array]:
        """Sums of all chunks with chunk c's gradients added, and the gradient of its input."""

    def sums_like(self, weights: tuple) -> Any:
        """Arrays of the shapes of gradient sums, from a tuple of trainable chunks."""

    def unstacked(self, sums: Any, virtual: int) -> tuple:
        """Gradient sums, as a tuple of chunks."""


@dataclass(frozen=True)
class SingleChunk:
    """A stage of one chunk, which is computed at every tick."""

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
    """A branch around all that a chunk computes, and one for idle slots."""

    schedule: Schedule

    def run(self, i: jax.Array, c: jax.Array, fn: Callable, idle: Callable) -> Any:
        work = [partial(fn, chunk, k) for k, chunk in enumerate(self.weights)]
        at_work = (i >= 0) & (i < self.schedule.num_actions)
        return lax.switch(jnp.where(at_work, c, len(work)), [*work, idle])


@dataclass(frozen=True)
class IndexedChunks:
    """Chunks in stacked arrays [v, ...], at a traced index."""

    model: StagedModel
    stacked: Any

    @property
    def first(self) -> Any:
        return take(self.stacked, 0)

    def run(self, i: jax.Array, c: jax.Array, fn: Callable, idle: Callable) -> Any:
        return fn(take(self.stacked, c), c)

    def backward(self, sums, vjps, g, context, chunk, c):
        d_chunk, dx = vjp_segments.pull_back(self.model, chunk, vjps[0], g, context)
        add = lambda total, part: total.at[c].add(part.astype(jnp.float32))  # noqa: E731
        return add_gradients(sums, d_chunk, add), dx

    def sums_like(self, weights: tuple) -> Any:
        return stacked(weights)

    def unstacked(self, sums: Any, virtual: int) -> tuple:
        return tuple(take(sums, k) for k in range(virtual))


def chunks_of(model: StagedModel, weights: tuple, schedule: Schedule) -> Chunks:
    """The way that this model's layers allow."""
    if not model.stage_wide_collectives:
        return BranchedChunks(model, weights, schedule)
    if schedule.virtual > 1:
        return IndexedChunks(model, stacked(weights))
    return SingleChunk(model, weights)


def stacked(weights: tuple) -> Any:
    """Chunks in arrays with a leading dim over them."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights)
