"""The grouped products in plain JAX, a tile at a time. All platforms run it.

Rows past the tiles in use are 0 in results.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.float8 import max_magnitude, power_of_two_scale, quantize
from jaxpar.kernels.glu import Activation, SwiGLU, activated
from jaxpar.kernels.grouped_matmul.tiles import Tiles

f32 = jnp.float32


def grouped_matmul(xs, ws, tiles: Tiles, *, transpose: bool, expert_dim: int) -> jax.Array:
    """`api.grouped_matmul`."""
    n = len(tiles.expert)
    by_tile = tuple(x.reshape(n, -1, x.shape[1]) for x in xs)
    dims = ((1,), (1 if transpose else 0,)), ((), ())

    def of_tile(tile):
        rows, expert, used = tile
        here = (lax.dynamic_index_in_dim(w, expert, expert_dim, keepdims=False) for w in ws)
        pairs = zip(rows, here, strict=True)
        terms = [lax.dot_general(x, w, dims, preferred_element_type=f32) for x, w in pairs]
        return jnp.where(used, functools.reduce(jnp.add, terms), 0).astype(xs[0].dtype)

    out = lax.map(of_tile, (by_tile, tiles.expert, _in_use(tiles)))
    return out.reshape(len(xs[0]), -1)


def scaled_matmul(xs, ws, scale, tiles: Tiles, *, expert_dim: int, dtype) -> jax.Array:
    """`float8.scaled_matmul`, with sums in float32."""
    wide = lambda arrays: tuple(a.astype(f32) for a in arrays)  # noqa: E731
    out = grouped_matmul(wide(xs), wide(ws), tiles, transpose=True, expert_dim=expert_dim)
    return (out * scale[:, None]).astype(dtype)


def grouped_outer(x, y, tiles: Tiles, *, expert_dim: int, dtype) -> jax.Array:
    """`api.grouped_outer`."""
    n, E = len(tiles.expert), len(tiles.starts) - 1
    by_tile = tuple(a.reshape(n, -1, a.shape[1]) for a in (x, y))
    shape = [x.shape[1], y.shape[1]]
    shape.insert(expert_dim, E)
    dims = ((0,), (0,)), ((), ())

    def add(total, tile):
        (x, y), expert, used = tile
        part = jnp.where(used, lax.dot_general(x, y, dims, preferred_element_type=f32), 0)
        here = lax.dynamic_index_in_dim(total, expert, expert_dim, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, here + part, expert, expert_dim), None

    total = _zeros(tuple(shape), f32, x, y, tiles.used)
    return lax.scan(add, total, (by_tile, tiles.expert, _in_use(tiles)))[0].astype(dtype)


def _in_use(tiles: Tiles) -> jax.Array:
    """Return which tiles hold rows. Not a branch: on GPUs, one waits for the host."""
    return jnp.arange(len(tiles.expert), dtype=jnp.int32) < tiles.used[0]


def rows_taken(x: tuple[jax.Array, ...], token: jax.Array) -> jax.Array:
    """`api.rows_taken`."""
    whole = x[0] if len(x) == 1 else jnp.concatenate(x)
    return whole.at[token].get(mode="promise_in_bounds")


def rows_added(y: jax.Array, rows: jax.Array) -> jax.Array:
    """`api.rows_added`."""
    found = y.at[jnp.maximum(rows, 0)].get(mode="promise_in_bounds").astype(f32)
    return jnp.sum(jnp.where((rows >= 0)[..., None], found, 0), axis=1).astype(y.dtype)


def glu_hidden(glu, gate, up, scale, tiles: Tiles, biases) -> jax.Array:
    """`api.glu_hidden`, in float32."""
    wide = (add_bias(a, bias, tiles) for a, bias in zip((gate, up), biases, strict=True))
    return glu.hidden(*wide) * scale[:, None]


def glu_backward(glu, gate, up, d_hidden, scale, tiles: Tiles, biases) -> tuple[jax.Array, ...]:
    """`api.glu_backward`."""
    wide, d_scale = _glu_backward(glu, gate, up, d_hidden, scale, tiles, biases)
    return *(a.astype(gate.dtype) for a in wide), d_scale


def _glu_backward(glu, gate, up, d_hidden, scale, tiles: Tiles, biases):
    """Return hidden values and gradients of gate and up in float32, and that of scale."""
    g, u = (add_bias(a, bias, tiles) for a, bias in zip((gate, up), biases, strict=True))
    d = d_hidden.astype(f32)
    wide, (act, value) = glu.gradients(g, u, d, scale[:, None])
    return wide, jnp.sum(act * value * d, axis=1)


def swiglu_in_float8(gate, up, scale, tiles: Tiles, dtype) -> tuple[jax.Array, ...]:
    """Return the hidden values in 8 bits, and each row's largest magnitude."""
    return rounded(dtype, SwiGLU().hidden(gate.astype(f32), up.astype(f32)) * scale[:, None])


def swiglu_backward_in_float8(gate, up, d_hidden, scale, tiles: Tiles, dtype):
    """Return `glu_backward` of SwiGLU, both gradients in 8 bits, and each row's largest
    magnitude."""
    given = gate, up, d_hidden, scale, tiles, (None, None)
    wide, d_scale = _glu_backward(SwiGLU(), *given)
    return *(a.astype(gate.dtype) for a in wide), d_scale, *rounded(dtype, *wide[1:])


def rounded(dtype, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Round the rows of arrays with common scales.

    Returns:  the arrays in 8 bits, and the largest magnitude of each row.
    """
    top = functools.reduce(jnp.maximum, [max_magnitude(a, 1) for a in arrays])
    scale = power_of_two_scale(top, dtype)[:, None]
    return *(quantize(a, scale, dtype) for a in arrays), top


def _zeros(shape, dtype, *like) -> jax.Array:
    """Return zeros whose type varies over the mesh axes over which any of `like` does."""
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in like))
    zeros = jnp.zeros(shape, dtype)
    return lax.pcast(zeros, tuple(sorted(axes)), to="varying") if axes else zeros


# --------- The biases of experts: each row has the bias of its expert. XLA compiles both directions


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


# --------------------------- The activation of experts without a gate. XLA compiles both directions
#
# R rows   F width


def plain_hidden(kind: Activation, up: jax.Array, scale: jax.Array) -> jax.Array:
    """Compute act(up) times scale.

    Args:     up: [R, F]. scale: float32 [R].
    Returns:  [R, F] in up's dtype.
    """
    return (activated(up.astype(f32), kind) * scale[:, None]).astype(up.dtype)


def plain_backward(
    kind: Activation, up: jax.Array, d_hidden: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the hidden values again, times scale, and the gradients of their factors.

    Args:     d_hidden: [R, F], gradient of the scaled hidden values. Others as `plain_hidden`.
    Returns:  (hidden, gradient of up: [R, F] in up's dtype; of scale: float32 [R]).
    """
    act, pullback = jax.vjp(functools.partial(activated, kind=kind), up.astype(f32))
    d, by_row = d_hidden.astype(f32), scale[:, None]
    (d_up,) = pullback(d * by_row)
    return (act * by_row).astype(up.dtype), d_up.astype(up.dtype), jnp.sum(act * d, axis=1)
