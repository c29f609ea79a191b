"""Fully sharded parameters (ZeRO): gather a weight before its use, scatter its gradient after.

The float32 master shard is cast to the compute dtype *before* the gather, which halves the bytes;
autodiff would then also reduce the gradient in the compute dtype, so the gather has its own
backward, which sums in float32 (`parallel.grad_reduce` chooses).

Gathers run on the leading dimension, where a collective's pieces lie end to end in memory; the
move there happens on the small shard, and the move back is a view that the matmul absorbs.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.axes import FSDP_AXES
from jaxpar.parallel.collectives import all_gather, all_to_all, psum_scatter

type Reduce = Literal["float32", "bfloat16"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(w: jax.Array, dim: int, dtype: Any, reduce: Reduce) -> jax.Array:
    """The whole weight, in the compute dtype, from each device's shard.

    Args:     w: float32 shard, `dim` split over FSDP_AXES. dim: counted from the end, negative.
              dtype: compute dtype. reduce: precision of the gradient's sum.
    Returns:  the weight with `dim` whole, in `dtype`.
    Communication: all-gather over FSDP_AXES of the weight in `dtype`; in the backward a
              reduce-scatter (`scatter`).
    Source:   Rajbhandari et al. 2020 (1910.02054), section 5.3.
    """
    local = jnp.moveaxis(w.astype(dtype), dim, 0)
    return jnp.moveaxis(all_gather(local, FSDP_AXES, dim=0), 0, dim)


def _gather_forward(w, dim, dtype, reduce):
    return gather(w, dim, dtype, reduce), None


def _gather_backward(dim, dtype, reduce, _, grad):
    return (scatter(grad, dim, reduce),)


gather.defvjp(_gather_forward, _gather_backward)


def scatter(grad: jax.Array, dim: int, reduce: Reduce) -> jax.Array:
    """Each device's shard of the sum of a whole weight's local gradients.

    In float32, the pieces travel in the dtype in which the matmul made them and are added up in
    float32 where they arrive: half the bytes of a float32 reduce-scatter, and the same sum.

    Args:     grad: local gradient of the whole weight. dim: negative, as in `gather`.
    Returns:  float32 shard, `dim` split over FSDP_AXES.
    Communication: over FSDP_AXES, an all-to-all of the gradient in its own dtype ("float32"), or
              a reduce-scatter in bfloat16 ("bfloat16").
    """
    leading = jnp.moveaxis(grad, dim, 0)
    if reduce == "bfloat16":
        shard = psum_scatter(leading.astype(jnp.bfloat16), FSDP_AXES, dim=0)
    else:
        ways = lax.axis_size(FSDP_AXES)
        pieces = leading.reshape(ways, -1, *leading.shape[1:])
        shard = jnp.sum(all_to_all(pieces, FSDP_AXES, 0, 0), axis=0, dtype=jnp.float32)
    return jnp.moveaxis(shard.astype(jnp.float32), 0, dim)


def gather_tree(tree: dict, dims: dict, dtype: Any, reduce: Reduce) -> dict:
    """`gather` every array of a flat dict whose entry in `dims` is not None; leave the others."""
    return {
        name: w if dims[name] is None else gather(w, dims[name], dtype, reduce)
        for name, w in tree.items()
    }


def scatter_tree(grads: dict, dims: dict, reduce: Reduce) -> dict:
    """The transpose of `gather_tree`, for gradients of arrays that were gathered beforehand.

    Arrays that are not sharded are left alone: `collectives.reduce_gradients` sums them.
    """
    return {
        name: g if dims[name] is None else scatter(g, dims[name], reduce)
        for name, g in grads.items()
    }
