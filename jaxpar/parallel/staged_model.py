"""The interface between the model and the schedules of microbatches."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import varying
from jaxpar.parallel.gradient_buffers import add_gradient

#: (loss to differentiate, loss to report), summed over tokens.
type Sums = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class StagedModel:
    """A model as functions of local shards. `mb` is one microbatch.

    embed    (top, mb) -> x. All stages call it together.
    stage    (chunk, x, context, passthrough) -> (x, passthrough). `passthrough` holds weights for
             `head`, whose gradients are sent during the layers' backward. For a segment of a chunk,
             the keyword `first` is the index in the chunk of its first layer.
    head     (top, x, mb) -> `Sums`. All stages call it together. It reads x only on the last stage,
             and only that stage receives a gradient.
    context  mb -> the attention context of its tokens, which `stage` reads.
    attach   (chunk, first) -> chunk with float32 gradient buffers, if matmuls accumulate weight
             gradients (`gradient_buffers.py`); `first` as for `stage`.
    """

    embed: Callable[..., jax.Array]
    stage: Callable[..., tuple[jax.Array, Any]]
    head: Callable[..., Sums]
    context: Callable[[Any], Any] = lambda mb: mb
    attach: Callable[[Any, int], Any] = lambda chunk, _: chunk
    stage_wide_collectives: bool = True
    """As `Execution.stage_wide_collectives`."""
    adds_gradients: bool = False
    """The backward of a stage adds gradients of its own (`router.with_losses`), so that it is not
    linear in the gradient that it receives."""
    layers_per_vjp: int = 0
    """As `Execution.layers_per_vjp`."""

    def segments(self, chunk: Any) -> tuple[Any, ...]:
        """Split a chunk of layers, or sums like it, into the parts that one VJP differentiates."""
        n = self.layers_per_vjp
        return tuple(itertools.batched(chunk, n)) if n else (chunk,)

    def joined(self, segments: Any) -> Any:
        """Undo `segments`."""
        return tuple(itertools.chain(*segments)) if self.layers_per_vjp else segments[0]


def take(tree: Any, i: Any) -> Any:
    """Take the i-th entry along the leading dim of every array."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def add_gradients(total: Any, part: Any, add: Callable = add_gradient) -> Any:
    """Add gradients to the float32 sums of the same names. Frozen weights have no sum.

    Args:     add: (sum, gradient) -> sum.
    """
    if isinstance(total, (tuple, list)):
        return type(total)(add_gradients(a, b, add) for a, b in zip(total, part, strict=True))
    if isinstance(total, dict):
        return {name: add_gradients(total[name], part[name], add) for name in total}
    return add(total, part)


def float32_zeros(tree: Any) -> Any:
    """Return float32 zeros of the same shapes, varying over every axis."""
    return varying(jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree))


def zeros_like_type(avals: Any) -> Any:
    """Return zeros of the same shapes, dtypes and varying axes."""

    def zeros(a):
        axes = tuple(sorted(a.manual_axis_type.varying))
        z = jnp.zeros(a.shape, a.dtype)
        return lax.pcast(z, axes, to="varying") if axes else z

    return jax.tree.map(zeros, avals)


def seed(sums: Sums, scale: jax.Array) -> Sums:
    """Return the cotangents of `Sums`, of which only the first is differentiated."""
    return jnp.ones_like(sums[0]) * scale, jnp.zeros_like(sums[1])
