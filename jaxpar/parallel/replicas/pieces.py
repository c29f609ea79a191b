"""Sums over replicas in few bytes: each replica adds up its piece of an array, and sends the sum.

An all-reduce adds numbers on their way, so it cannot send codes that only mean something with a
scale. Here, codes travel by all-to-all, are decoded and added in float32, and the sum of each piece
travels as codes again, by all-gather. Both together send as many elements as an all-reduce.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import all_gather_invariant, all_to_all
from jaxpar.sharding.axes import REPLICA

#: Neighboring elements that share a scale.
BLOCK = 256

#: Largest code. -128 is not used, so that codes are symmetric.
LARGEST = 127

#: Arrays that are sent in place of float32 [..., n].
type Codes = tuple[jax.Array, ...]


def sum_pieces(
    x: jax.Array, block: int, encode: Callable[[jax.Array], Codes], decode: Callable
) -> tuple[jax.Array, jax.Array]:
    """Sum over replicas, and return what the codes left out.

    Args:     x: float32, any shape. block: pieces are multiples of it; the last one is padded with
              zeros. encode: float32 [..., block] -> codes with the same first dims. decode: undoes
              `encode`, up to its rounding.
    Returns:  (the sum, the same on every replica; this replica's error, of the shape of x). An
              error is what the codes of this replica lack, plus what the codes of the sum lack in
              the piece that it adds up: errors and sum add up to the sum of all x.
    Communication: over REPLICA, an all-to-all and an all-gather of the codes.
    """
    n = lax.axis_size(REPLICA)
    blocks = -(-x.size // (n * block))
    padded = jnp.pad(x.reshape(-1), (0, n * blocks * block - x.size))
    pieces = padded.reshape(n, blocks, block)
    codes = encode(pieces)
    received = decode(*(all_to_all(c, REPLICA, 0, 0) for c in codes))
    own = jnp.sum(received, axis=0)
    summed = encode(own)
    gathered = decode(*(all_gather_invariant(c[None], (REPLICA,), 0) for c in summed))
    left = (pieces - decode(*codes)).at[lax.axis_index(REPLICA)].add(own - decode(*summed))
    flat = lambda a: a.reshape(-1)[: x.size].reshape(x.shape)  # noqa: E731
    return flat(gathered), flat(left)


def to_int8(x: jax.Array) -> Codes:
    """Round float32 [..., block] to int8 codes, with one float32 scale per block.

    A block with an infinity or a NaN gets a scale that is not finite, and stays recognizable.
    """
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LARGEST
    codes = jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    return codes, scale


def from_int8(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Undo `to_int8`."""
    return codes.astype(jnp.float32) * scale


#: The sum in int8. Source: Dettmers 2015 (1511.04561) for 8-bit gradients; Seide et al. 2014 for
#: error feedback, and 1-bit Adam (2102.02888), figure 3, for the two rounds.
sum_int8 = functools.partial(sum_pieces, block=BLOCK, encode=to_int8, decode=from_int8)


def to_bfloat16(x: jax.Array) -> Codes:
    """Round float32 to bfloat16, as uint16: XLA may send a bfloat16 array in float32."""
    return (lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),)


def from_bfloat16(codes: jax.Array) -> jax.Array:
    """Undo `to_bfloat16`."""
    return lax.bitcast_convert_type(codes, jnp.bfloat16).astype(jnp.float32)


def sum_bfloat16(x: jax.Array) -> jax.Array:
    """Sum over replicas in bfloat16: values and sums are rounded once each, and added in float32.

    Communication: over REPLICA, an all-to-all and an all-gather of 16 bits per element.
    """
    return sum_pieces(x, 1, to_bfloat16, from_bfloat16)[0]
