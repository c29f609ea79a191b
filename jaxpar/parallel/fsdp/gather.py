"""Fully sharded parameters (ZeRO): gather a weight before its use, scatter its gradient after.

The float32 master shard is cast to the compute dtype *before* the gather, which halves the bytes;
autodiff would then also reduce the gradient in the compute dtype, so the gather has its own
backward, which sums in float32 (`parallel.grad_reduce` chooses).

Gathers run on the leading dimension, where a collective's pieces lie end to end in memory; the
move there happens on the small shard, and the move back is a view that the matmul absorbs.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpar.kernels import float8
from jaxpar.parallel.collectives import all_gather, all_to_all, pmax, psum_scatter, varying
from jaxpar.sharding.axes import FSDP_AXES

type Reduce = Literal["float32", "bfloat16"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
@jax.named_scope("gather_weights")
def gather(w: jax.Array, dim: int, dtype: Any, reduce: Reduce) -> jax.Array:
    """The whole weight, in the compute dtype, from each device's shard.

    Args:     w: float32 shard, `dim` split over FSDP_AXES. dim: counted from the end, negative.
              dtype: compute dtype. reduce: precision of the gradient's sum.
    Returns:  the weight with `dim` whole, in `dtype`.
    Communication: all-gather over FSDP_AXES of the weight in `dtype`; in the backward that of
              `scatter`.
    Source:   Rajbhandari et al. 2020 (1910.02054), section 5.3.
    """
    local = jnp.moveaxis(w.astype(dtype), dim, 0)
    return jnp.moveaxis(all_gather(local, FSDP_AXES, dim=0), 0, dim)


def _gather_forward(w, dim, dtype, reduce):
    return gather(w, dim, dtype, reduce), None


def _gather_backward(dim, dtype, reduce, _, grad):
    return (scatter(grad, dim, reduce),)


gather.defvjp(_gather_forward, _gather_backward)


@jax.named_scope("scatter_gradients")
def scatter(grad: jax.Array, dim: int, reduce: Reduce) -> jax.Array:
    """Each device's shard of the sum of a whole weight's local gradients.

    In float32, the pieces travel in the dtype in which the matmul made them and are added up in
    float32 where they arrive: half the bytes of a float32 reduce-scatter, and the same sum.

    Args:     grad: local gradient of the whole weight. dim: negative, as in `gather`.
    Returns:  float32 shard, `dim` split over FSDP_AXES.
    Communication: over FSDP_AXES, an all-to-all of the gradient in its own dtype ("float32"), or
              a reduce-scatter in bfloat16 ("bfloat16").
    """
    leading, ways = jnp.moveaxis(grad, dim, 0), lax.axis_size(FSDP_AXES)
    if reduce == "bfloat16" and ways > 1:  # alone there is nothing to sum, or to round for it
        shard = psum_scatter(leading.astype(jnp.bfloat16), FSDP_AXES, dim=0)
    else:
        pieces = leading.reshape(ways, -1, *leading.shape[1:])
        shard = jnp.sum(all_to_all(pieces, FSDP_AXES, 0, 0), axis=0, dtype=jnp.float32)
    return jnp.moveaxis(shard.astype(jnp.float32), 0, dim)


@jax.named_scope("gather_weights")
def quantize_shard(w: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """e4m3, w * scale: what `gather_float8` sends of a float32 shard."""
    return float8.quantize(w.astype(dtype), scale, float8.FORWARD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
@jax.named_scope("gather_weights")
def gather_float8(
    w: jax.Array, scale: jax.Array, dim: int, dtype: Any, reduce: Reduce
) -> tuple[jax.Array, jax.Array]:
    """The whole weight in 8 bits: the bits of a gathered weight rounded, at half the bytes.

    Args:     w, dim, dtype, reduce: as in `gather`; w may be rounded already (`quantize_shard`).
              scale: float32 scalar, the same on every device of FSDP_AXES.
    Returns:  e4m3, w * scale with `dim` whole; and an array of its shape in `dtype`, never to be
              read, whose gradient is the whole weight's.
    Communication: as `gather`, with a byte per element forward.
    """
    local = w if w.dtype == float8.FORWARD else quantize_shard(w, scale, dtype)
    whole = all_gather(jnp.moveaxis(local, dim, 0), FSDP_AXES, dim=0)
    values = jnp.moveaxis(whole, 0, dim)
    return values, varying(jnp.zeros(values.shape, dtype))


def _gather_float8_forward(w, scale, dim, dtype, reduce):
    return gather_float8(w, scale, dim, dtype, reduce), None


def _gather_float8_backward(dim, dtype, reduce, _, grads):
    return scatter(grads[1], dim, reduce), None


gather_float8.defvjp(_gather_float8_forward, _gather_float8_backward)


@jax.named_scope("float8_scales")
def float8_scales(tree: Any, names: Sequence[str], dtype: Any) -> Any:
    """The scale of each matrix of the layers, for e4m3: a power of two from the largest magnitude.

    Args:     tree: dicts of shards, in tuples; matrices lie in their last two dims.
              names: which to scale. dtype: compute dtype.
    Returns:  dicts of float32 arrays without those two dims, the same on each device of FSDP_AXES.
    Communication: one all-reduce over FSDP_AXES, of a number per matrix, for all the layers.
    """

    def largest(w: Any) -> Any:
        if isinstance(w, tuple):
            return tuple(map(largest, w))
        return {n: float8.max_magnitude(w[n].astype(dtype), (-2, -1)) for n in names}

    numbers, restore = ravel_pytree(largest(tree))
    whole = restore(pmax(numbers, FSDP_AXES))
    return jax.tree.map(lambda a: float8.power_of_two_scale(a, float8.FORWARD), whole)


def gather_tree(tree: dict, dims: dict, dtype: Any, reduce: Reduce) -> dict:
    """`gather` every array of a flat dict whose entry in `dims` is not None; leave the others."""
    return {
        name: w if dims[name] is None else gather(w, dims[name], dtype, reduce)
        for name, w in tree.items()
    }


def scatter_tree(grads: dict, dims: dict, reduce: Reduce) -> dict:
    """The transpose of `gather_tree`, for gradients of arrays that were gathered beforehand.

    Arrays that are not sharded are left alone: `gradients.reduce_gradients` sums them.
    """
    return {
        name: g if dims[name] is None else scatter(g, dims[name], reduce)
        for name, g in grads.items()
    }
