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
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import OptimizerConfig
from jaxpar.config.layout.moment_blocks import block_of
from jaxpar.sharding.params import ParamSpec

# -------- The 8-bit codes of moments: numbers from -1 to 1, or from 0 to 1, of very different sizes
#
# Each power of ten is divided into equal intervals, twice as many as the next smaller one: 128, 64,
# 32 and so on without a sign, half as many with one. So large numbers are precise and small ones
# are not lost. A number is stored as its interval, and read as the middle of it; 0 and 1 are exact.
# These are the numbers of the dynamic tree type of Dettmers et al. 2022 (2110.02861, section 2.2),
# as in bitsandbytes. Unlike there, the signed code is symmetric: it has -1 beside 1, and no numbers
# below 1e-6.
#
# Without a sign, only 0 is stored as 0: a second moment that vanishes beside a first moment that
# does not would be a division by `optimizer.eps` (Li et al. 2023, 2309.01507, section 4.1).
#
# The position of a number among the intervals is concave and linear within each power of ten, so it
# is the smallest of a few linear functions, and its inverse the largest of theirs: arithmetic that
# a compiler fuses into the update, without tables.


@dataclass(frozen=True)
class DynamicCode:
    """Codes with a sign, their upper bit, or without."""

    signed: bool

    @property
    def decades(self) -> int:
        """Powers of ten. The intervals of the j-th, from 1, are [2^j, 2^(j+1)) of the positions."""
        return 6 if self.signed else 7

    @property
    def lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Slope and value at 0 of the position of a number, in each power of ten: float64."""
        j = np.arange(1, self.decades + 1)
        return 2.0**j / 0.9 * 10.0 ** (self.decades - j), 2.0**j * (1 - 1 / 9)

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the codes of numbers, uint8.

        Args:     x: float32, from -1 to 1, or from 0 to 1.
        """
        size, top = jnp.abs(x), 2 ** (self.decades + 1)
        lines = [size * np.float32(a) + np.float32(b) for a, b in zip(*self.lines, strict=True)]
        position = lines[0]
        for line in lines[1:]:
            position = jnp.minimum(position, line)
        # The last interval ends where its middle and 1 are equally near.
        position = jnp.where(position < top - 0.25, position, top)
        code = position.astype(jnp.int32) - 1
        if self.signed:
            code += 128 * (x < 0)
        else:
            code = jnp.maximum(code, (x > 0).astype(jnp.int32))
        return code.astype(jnp.uint8)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the numbers of codes, float32."""
        code = codes.astype(jnp.int32)
        middle = (code & 127 if self.signed else code).astype(jnp.float32) + 1.5
        slopes, values = self.lines
        x = jnp.float32(0)
        for a, b in zip(1 / slopes, values / slopes, strict=True):
            x = jnp.maximum(x, middle * np.float32(a) - np.float32(b))
        x = jnp.minimum(x, 1)
        return jnp.where(code < 128, x, -x) if self.signed else x


# ------------------------------------------------------------- Blocks, their scales and their codes


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
