"""The biases of experts: each row has the bias of its expert. XLA compiles both directions."""

import jax
import jax.numpy as jnp

from jaxpar.kernels.grouped_matmul.tiles import Tiles

f32 = jnp.float32


def add_bias(y: jax.Array, bias: jax.Array | None, tiles: Tiles) -> jax.Array:
    """Convert rows to float32, and add the bias of their expert, if there are biases.

    Args:     y: [R, F]. bias: float32 [E, F], or None.
    Returns:  float32 [R, F].
    """
    if bias is None:
        return y.astype(f32)
    by_tile = y.astype(f32).reshape(len(tiles.expert), -1, y.shape[1])
    of_tile = bias.at[tiles.expert].get(mode="promise_in_bounds")
    return (by_tile + of_tile[:, None]).reshape(y.shape)


def bias_gradient(d_y: jax.Array, tiles: Tiles) -> jax.Array:
    """Sum the rows of each expert, in float32 and in a fixed order.

    Args:     d_y: [R, F]; 0 in rows that are padding.
    Returns:  float32 [E, F].
    """
    n, E = len(tiles.expert), len(tiles.starts) - 1
    by_tile = jnp.sum(d_y.astype(f32).reshape(n, -1, d_y.shape[1]), axis=1)
    in_use = (jnp.arange(n, dtype=jnp.int32) < tiles.used[0])[:, None]
    of_expert = tiles.expert[:, None] == jnp.arange(E, dtype=jnp.int32)
    # A product with 0 and 1: a scatter would add in any order.
    pair = of_expert.astype(f32), jnp.where(in_use, by_tile, 0)
    return jnp.einsum("ne,nf->ef", *pair, precision="highest")
