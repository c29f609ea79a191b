"""Fully sharded parameters (ZeRO): gather a weight before its use, scatter its gradient after it.

The float32 master shard is cast to the compute dtype *before* the gather, which halves the bytes.
Autodiff would then also reduce the gradient in the compute dtype, so the gather has a custom
backward, which sums in float32 by default (`parallel.grad_reduce`).

Gathers use the leading dimension, in which the shards are contiguous in memory. The transpose to
the leading dimension reads only the small shard. The matmul absorbs the transpose back.
"""

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpar.kernels import float8
from jaxpar.parallel.collectives import all_gather, all_to_all, pmax, psum_scatter, varying
from jaxpar.sharding.axes import FSDP_AXES

type Reduce = Literal["float32", "bfloat16"]


class Split(NamedTuple):
    """How a weight is split over devices."""

    dim: int
    """The split dimension, negative: counted from the end."""
    axes: tuple[str, ...] = FSDP_AXES
    """Mesh axes over which it is split."""


#: A `Split`, or the dimension that is split over FSDP_AXES.
type Dim = int | Split

#: The `Dim` of arrays by name. None: whole on every device.
type Dims = Mapping[str, Dim | None]


def _split(dim: Dim) -> Split:
    return dim if isinstance(dim, Split) else Split(dim)


def dim_of(dim: Dim | None) -> int:
    """Return the dimension that is split. Args:     dim: of a matrix, and so not None."""
    assert dim is not None
    return _split(dim).dim


def is_whole(dim: Dim | None) -> bool:
    """Return whether every device has a complete array, since its axes have one device."""
    return dim is None or lax.axis_size(_split(dim).axes) == 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
@jax.named_scope("gather_weights")
def gather(w: jax.Array, dim: Dim, dtype: Any, reduce: Reduce) -> jax.Array:
    """Gather a complete weight, in the compute dtype, from the devices' shards.

    Args:     w: float32 shard, `dim` split over FSDP_AXES. dim: negative, counted from the end; or
              a `Split` over other axes.
              dtype: compute dtype. reduce: precision of the gradient's sum.
    Returns:  the weight with complete `dim`, in `dtype`.
    Communication: all-gather over FSDP_AXES of the weight in `dtype`; in the backward that of
              `scatter`.
    Source:   Rajbhandari et al. 2020 (1910.02054), section 5.3.
    """
    dim, axes = _split(dim)
    local = jnp.moveaxis(w.astype(dtype), dim, 0)
    return jnp.moveaxis(all_gather(local, axes, dim=0), 0, dim)


def _gather_forward(w, dim, dtype, reduce):
    return gather(w, dim, dtype, reduce), None


def _gather_backward(dim, dtype, reduce, _, grad):
    return (scatter(grad, dim, reduce),)


gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gathered_earlier(w: jax.Array, whole: jax.Array, dim: Dim, reduce: Reduce) -> jax.Array:
    """Return a weight that was gathered before, with the gradient of `gather` (ZeRO-2).

    Args:     w: float32 shard, which receives the gradient. Its values are never read. whole: the
              complete weight. dim, reduce: as in `gather`.
    Communication: none; in the backward that of `scatter`.
    """
    return whole


def _gathered_earlier_forward(w, whole, dim, reduce):
    return whole, None


def _gathered_earlier_backward(dim, reduce, _, grad):
    return scatter(grad, dim, reduce), None


gathered_earlier.defvjp(_gathered_earlier_forward, _gathered_earlier_backward)


@jax.named_scope("scatter_gradients")
def scatter(grad: jax.Array, dim: Dim, reduce: Reduce) -> jax.Array:
    """Sum the devices' local gradients of a complete weight and return this device's shard.

    With "float32", gradients are sent in the dtype of the matmul that computed them and summed in
    float32 by the receiver: half the bytes of a float32 reduce-scatter, and the same sum.

    Args:     grad: local gradient of the complete weight. dim: as in `gather`.
    Returns:  float32 shard, `dim` split over FSDP_AXES.
    Communication: over FSDP_AXES, an all-to-all of the gradient in its own dtype ("float32"), or
              a reduce-scatter in bfloat16 ("bfloat16").
    """
    dim, axes = _split(dim)
    leading, ways = jnp.moveaxis(grad, dim, 0), lax.axis_size(axes)
    if reduce == "bfloat16" and ways > 1:  # a single device has nothing to sum, so does not round
        shard = psum_scatter(leading.astype(jnp.bfloat16), axes, dim=0)
    else:
        pieces = leading.reshape(ways, -1, *leading.shape[1:])
        shard = jnp.sum(all_to_all(pieces, axes, 0, 0), axis=0, dtype=jnp.float32)
    return jnp.moveaxis(shard.astype(jnp.float32), 0, dim)


@jax.named_scope("gather_weights")
def quantize_shard(w: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Round w * scale to e4m3: the form in which `gather_float8` sends a float32 shard."""
    return float8.quantize(w.astype(dtype), scale, float8.FORWARD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
@jax.named_scope("gather_weights")
def gather_float8(
    w: jax.Array, scale: jax.Array, dim: Dim, dtype: Any, reduce: Reduce
) -> tuple[jax.Array, jax.Array]:
    """Gather a complete weight in 8 bits: the same bits as rounding after `gather`, half the bytes.

    Args:     w, dim, dtype, reduce: as in `gather`; w may be rounded already (`quantize_shard`).
              scale: float32 scalar, the same on every device of these axes.
    Returns:  (w * scale in e4m3 with complete `dim`, an array of the same shape in `dtype`). The
              second is never read; its gradient is the gradient of the complete weight.
    Communication: as `gather`, with one byte per element in the forward.
    """
    dim, axes = _split(dim)
    local = w if w.dtype == float8.FORWARD else quantize_shard(w, scale, dtype)
    whole = all_gather(jnp.moveaxis(local, dim, 0), axes, dim=0)
    values = jnp.moveaxis(whole, 0, dim)
    return values, varying(jnp.zeros(values.shape, dtype))


def _gather_float8_forward(w, scale, dim, dtype, reduce):
    return gather_float8(w, scale, dim, dtype, reduce), None


def _gather_float8_backward(dim, dtype, reduce, _, grads):
    return scatter(grads[1], dim, reduce), None


gather_float8.defvjp(_gather_float8_forward, _gather_float8_backward)


@jax.named_scope("float8_scales")
def float8_scales(largest: Any) -> Any:
    """Compute the e4m3 scale of each matrix: a power of two, from its largest magnitude.

    Args:     largest: a tree of the largest magnitudes of this device's shards.
    Returns:  the same tree of float32 scales, the same on each device of FSDP_AXES.
    Communication: one all-reduce over FSDP_AXES for all layers, of one value per matrix.
    """
    numbers, restore = ravel_pytree(largest)
    whole = restore(pmax(numbers, FSDP_AXES))
    return jax.tree.map(lambda a: float8.power_of_two_scale(a, float8.FORWARD), whole)


def gather_tree(tree: dict, dims: Dims, dtype: Any, reduce: Reduce) -> dict:
    """`gather` every array of a flat dict whose entry in `dims` is not None; keep the others."""

    def whole(name: str, w: jax.Array) -> jax.Array:
        return w if (dim := dims[name]) is None else gather(w, dim, dtype, reduce)

    return {name: whole(name, w) for name, w in tree.items()}


def scatter_tree(grads: dict, dims: Dims, reduce: Reduce) -> dict:
    """Compute the transpose of `gather_tree`, for gradients of arrays that were gathered earlier.

    Arrays that are not sharded are unchanged; `gradients.reduce_gradients` sums them.
    """

    def shard(name: str, g: jax.Array) -> jax.Array:
        return g if (dim := dims[name]) is None else scatter(g, dim, reduce)

    return {name: shard(name, g) for name, g in grads.items()}
