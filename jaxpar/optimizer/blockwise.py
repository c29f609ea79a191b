"""Moments in 8 bits: arrays in blocks, each with a float32 scale, the largest magnitude in it.

A block is neighboring elements along one dim of a parameter, of one row, head, layer and expert. It
depends on the parameter's shape and on `optimizer.moment_block` alone, and a rule of the config
keeps it within a device's shard. So a moment is the same on every mesh, and scales are an array
like the parameter, with the same sharding, in which that dim counts blocks.

Blocks along rows of the embedding table, and along columns of the head, belong to one token each:
tokens that are rare, with small gradients, do not share a scale with others.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.config import OptimizerConfig
from jaxpar.config.layout.moment_blocks import block_of
from jaxpar.optimizer.dynamic_code import DynamicCode
from jaxpar.sharding.params import ParamSpec

#: Logical axes along which blocks lie, in the order of preference: first those that no mesh splits,
#: then those that few devices split.
AXES = ("head_dim", "rank", "router", "whole_mlp", "mlp", "embed", "expert_embed", "latent")

#: Matrices with fewer elements stay in float32, as in bitsandbytes.
FEWEST_ELEMENTS = 4096


class Blocks(NamedTuple):
    """How an array is divided: blocks of `size` elements along `dim`."""

    dim: int
    size: int


def blocks_of(spec: ParamSpec, cfg: OptimizerConfig) -> Blocks | None:
    """Return the blocks of a parameter's moments; None if they stay in float32.

    Norms and biases do, and matrices that are small or have no dim that can be divided.
    """
    lead, dims = spec.lead, len(spec.shape)
    small = math.prod(spec.shape[lead:]) < FEWEST_ELEMENTS
    if small or dims - lead < 2 or not spec.decay:
        return None
    order = [dim for axis in AXES for dim in reversed(range(lead, dims)) if spec.axes[dim] == axis]
    sizes = ((dim, block_of(spec.shape[dim], cfg.moment_block)) for dim in order)
    return next((Blocks(dim, size) for dim, size in sizes if size), None)


def is_quantized(node: Any) -> bool:
    """Return whether a node of a tree is a moment in 8 bits."""
    return isinstance(node, dict) and node.keys() == {"codes", "scales"}


def blocks_in(moment: Any) -> Blocks:
    """Return the blocks of a quantized moment, of the complete array or of a shard."""
    codes, scales = moment["codes"].shape, moment["scales"].shape
    (dim,) = (i for i, (n, blocks) in enumerate(zip(codes, scales, strict=True)) if n != blocks)
    return Blocks(dim, codes[dim] // scales[dim])


def scales_of(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the largest magnitude in each block: x's shape, with blocks in place of elements."""
    if x.shape[blocks.dim] == blocks.size:
        return jnp.max(jnp.abs(x), axis=blocks.dim, keepdims=True)
    return jnp.max(jnp.abs(_divide(x, blocks)), axis=blocks.dim + 1)


def quantize(
    x: jax.Array, blocks: Blocks, code: DynamicCode, scales: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Round an array to 8-bit codes and one scale a block.

    Args:     x: float32; finite. scales: `scales_of` x, if they are known.
    Returns:  {"codes": uint8 with x's shape, "scales": float32 with the number of blocks in place
              of the size of their dim}.
    Source:   Dettmers et al. 2022 (2110.02861), section 2.1.
    """
    scales = scales_of(x, blocks) if scales is None else scales

    def encode(x: jax.Array, each: jax.Array) -> jax.Array:
        return code.encode(jnp.where(each > 0, x / each, 0.0))

    return {"codes": _with_scales(encode, x, scales, blocks), "scales": scales}


def dequantize(moment: Any, code: DynamicCode) -> jax.Array:
    """Return the float32 array of `quantize`'s result."""
    decode = lambda codes, each: code.decode(codes) * each  # noqa: E731
    return _with_scales(decode, moment["codes"], moment["scales"], blocks_in(moment))


def _with_scales(
    fn: Callable[..., jax.Array], x: jax.Array, scales: jax.Array, blocks: Blocks
) -> jax.Array:
    """Apply `fn` to an array and the scale of each element. Returns an array of x's shape.

    Scales are broadcast, rather than x reshaped to blocks, because XLA then fuses more.
    """
    if scales.shape[blocks.dim] == 1:
        return fn(x, scales)
    dim, size = blocks
    shape = (*scales.shape[: dim + 1], size, *scales.shape[dim + 1 :])
    each = jnp.broadcast_to(jnp.expand_dims(scales, dim + 1), shape)
    return fn(x, each.reshape(x.shape))


def _divide(x: jax.Array, blocks: Blocks) -> jax.Array:
    """[..., n, ...] -> [..., n / size, size, ...]."""
    dim, size = blocks
    return x.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
