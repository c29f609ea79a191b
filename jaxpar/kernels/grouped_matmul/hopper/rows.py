"""Rows from tokens, and tokens from rows: a warpgroup for each, which moves only what exists."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.kernels.attention.hopper.mma import compiler, varying_as
from jaxpar.kernels.attention.tiles import MULTIPROCESSORS
from jaxpar.kernels.float8.rounding import SMALLEST
from jaxpar.kernels.grouped_matmul.hopper.pipeline import ROWS, div
from jaxpar.kernels.grouped_matmul.tiles import Tiles

# --------------------------------------- Passes over the rows in use, with a warpgroup for each row


#: CTAs of a pass: as many as fit on the multiprocessors, with the registers of a row's arrays.
COPYING, COMPUTING = 16 * MULTIPROCESSORS, 8 * MULTIPROCESSORS


def each_row(
    row: Callable[..., None],
    tiles: Tiles,
    ctas: int,
    out_type: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
) -> tuple[jax.Array, ...]:
    """Call row(r, *operands, *results) for each row r in use, and return the results.

    A CTA has a single warpgroup, since Mosaic's sum or maximum of a row uses memory that all
    warpgroups of a CTA share.
    """

    def kernel(used, *refs):
        cta = lax.axis_index("cta")
        each = lambda i, _: row(cta + i * ctas, *refs)  # noqa: E731
        lax.fori_loop(0, div(used[0] * ROWS - cta + (ctas - 1), ctas), each, None)

    out = plgpu.kernel(
        kernel,
        out_type=tuple(out_type),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=compiler(),
    )(tiles.used, *operands)
    return tuple(functools.reduce(varying_as, operands, a) for a in out)


def sigmoid(x):
    """Compute the sigmoid by operations that Mosaic's compiler supports."""
    return 1.0 / (1.0 + jnp.exp(-x))


#: CTAs, and warpgroups of each: as many as fit on the multiprocessors.
CTAS, WARPGROUPS = 4 * MULTIPROCESSORS, 4


def rows_taken(
    x: tuple[jax.Array, ...], token: jax.Array, tiles: Tiles, ctas: int = CTAS
) -> jax.Array:
    """`api.rows_taken` for widths of multiples of 128, and tiles of 128."""
    out = plgpu.kernel(
        functools.partial(_take, len(token) // len(tiles.expert), ctas),
        out_type=jax.ShapeDtypeStruct((len(token), x[0].shape[1]), x[0].dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=compiler(),
    )(*x, token, tiles.used)
    return functools.reduce(varying_as, (*x, token), out)


def of_part(x: Sequence[Any], t: Any, use: Callable[[Any], None]) -> None:
    """Call use(row t of the parts x): of whichever part has it. In a kernel."""
    if len(x) == 1:
        use(x[0][t])
        return
    size = x[0].shape[0]
    for n, part in enumerate(x):
        row = t - n * size
        pl.when((row >= 0) & (row < size))(functools.partial(_use_row, part, row, use))


def _use_row(part: Any, row: Any, use: Callable[[Any], None]) -> None:
    use(part[row])


def _take(tile: int, ctas: int, *refs):
    *x, token, used, out = refs
    step = ctas * WARPGROUPS
    me = lax.axis_index("cta") * WARPGROUPS + lax.axis_index("warpgroup")

    def row(i, _):
        r = me + i * step

        def copy(values):
            out[r] = values

        of_part(x, token[r], copy)

    lax.fori_loop(0, div(used[0] * tile - me + (step - 1), step), row, None)


def rows_added(y: jax.Array, rows: jax.Array, ctas: int = CTAS) -> jax.Array:
    """`api.rows_added` for widths of multiples of 128."""
    (_, D), T = y.shape, len(rows)
    out = plgpu.kernel(
        functools.partial(_kernel, T, D, ctas),
        out_type=jax.ShapeDtypeStruct((T, D), y.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=compiler(),
    )(y, _listed(rows))
    return varying_as(varying_as(out, y), rows)


def _listed(rows: jax.Array) -> jax.Array:
    """Return int32 [T, 1 + k]: how many rows a token has, then these rows, in their order."""
    there = rows >= 0
    order = jnp.argsort(~there, axis=1, stable=True) if rows.shape[1] > 1 else jnp.zeros_like(rows)
    first = jnp.take_along_axis(rows, order, axis=1)
    return jnp.concatenate([jnp.sum(there, axis=1, dtype=jnp.int32)[:, None], first], axis=1)


def _kernel(T: int, D: int, ctas: int, y, listed, out):
    f32, step = jnp.float32, ctas * WARPGROUPS
    me = lax.axis_index("cta") * WARPGROUPS + lax.axis_index("warpgroup")

    def token(i, _):
        t = me + i * step
        add = lambda j, total: total + y[listed[t, 1 + j]].astype(f32)  # noqa: E731
        total = lax.fori_loop(0, listed[t, 0], add, jnp.zeros((D,), f32))
        out[t] = total.astype(out.dtype)

    lax.fori_loop(0, div(T - me + (step - 1), step), token, None)


# ------------------------- Rows in 8 bits, with a scale each, rounded by the passes that write them
#
# A warpgroup holds a row in registers, finds its largest magnitude, and rounds it: no pass reads
# what another one wrote.


#: Bits of a float32's mantissa, and the bias of its exponent.
_MANTISSA, _BIAS = 23, 127

f32, i32 = jnp.float32, jnp.int32


def rows_taken_in_float8(
    x: tuple[jax.Array, ...],
    token: jax.Array,
    tiles: Tiles,
    dtype,
    *,
    keep: bool,
    ctas: int = COPYING,
) -> tuple[jax.Array, ...]:
    """Copy the token of each row, in 8 bits, and with `keep` also in x's dtype.

    Args:     x: [T, D] in equal parts.
    Returns:  (8 bits [R, D], largest magnitudes float32 [R]), and with `keep` [R, D].
    """
    R, (_, D) = len(token), x[0].shape

    def row(r, *refs):
        x, (token, q, top, *kept) = refs[:parts], refs[parts:]

        def copy(values):
            for out in kept:
                out[r] = values
            q[r], top[r] = _rounded(dtype, values.astype(f32))

        of_part(x, token[r], copy)

    parts, kept = len(x), [jax.ShapeDtypeStruct((R, D), x[0].dtype)] * keep
    return each_row(row, tiles, ctas, _in_8_bits(R, D, dtype) + kept, *x, token)


def swiglu_in_float8(
    gate, up, scale, tiles: Tiles, dtype, ctas: int = COMPUTING
) -> tuple[jax.Array, ...]:
    """Compute silu(gate) * up * scale in 8 bits.

    Returns:  (8 bits [R, F], largest magnitudes float32 [R]).
    """

    def row(r, gate, up, scale, q, top):
        g, u = gate[r].astype(f32), up[r].astype(f32)
        q[r], top[r] = _rounded(dtype, g * sigmoid(g) * u * scale[r])

    return each_row(
        row, tiles, ctas, _in_8_bits(gate.shape[0], gate.shape[1], dtype), gate, up, scale
    )


def swiglu_backward_in_float8(
    gate, up, d_hidden, scale, tiles: Tiles, dtype, ctas: int = COMPUTING
) -> tuple[jax.Array, ...]:
    """Compute `api.glu_backward` of SwiGLU, and both gradients also in 8 bits, with a common scale.

    Returns:  (hidden, gradient of gate, gradient of up: [R, F]; of scale: float32 [R]; the two
              gradients in 8 bits [R, F]; their largest magnitudes, float32 [R]).
    """
    (R, F), wide = gate.shape, jax.ShapeDtypeStruct(gate.shape, gate.dtype)

    def row(r, gate, up, d_hidden, scale, hidden, d_gate, d_up, d_scale, q_gate, q_up, top):
        g, u, d, s = *(a[r].astype(f32) for a in (gate, up, d_hidden)), scale[r]
        s_g = sigmoid(g)
        act = g * s_g
        h, ds = act * u, d * s
        dg, du = ds * u * (s_g + act * (1.0 - s_g)), ds * act
        for out, value in ((hidden, h * s), (d_gate, dg), (d_up, du)):
            out[r] = value.astype(out.dtype)
        d_scale[r] = jnp.sum(h * d)
        q_gate[r], q_up[r], top[r] = _rounded(dtype, dg, du)

    q, top = _in_8_bits(R, F, dtype)
    made = [wide, wide, wide, top, q, q, top]
    return each_row(row, tiles, ctas, made, gate, up, d_hidden, scale)


def _in_8_bits(R: int, width: int, dtype) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((R, width), dtype), jax.ShapeDtypeStruct((R,), f32)]


def _rounded(dtype, *rows):
    """Round rows of numbers with a common scale, as `quantize.quantize` and `power_of_two_scale`.

    Returns:  the rows in `dtype`, and the largest magnitude: a scalar.
    """
    tops = [jnp.max(jnp.abs(row)) for row in rows]
    top = functools.reduce(jnp.maximum, tops)
    # Bits of scalars have no lowering, so every element has the scale.
    each = lax.broadcast_in_dim(top, rows[0].shape, ())
    # Exponents by integers: a division is approximate here, and the scale is computed again.
    bits = lax.bitcast_convert_type(jnp.maximum(each, SMALLEST), i32)
    steps = (_bits(jnp.finfo(dtype).max) - bits) >> _MANTISSA
    power = lax.bitcast_convert_type((steps + _BIAS) << _MANTISSA, f32)
    scale = jnp.where(each < jnp.inf, power, jnp.nan)
    return *((row * scale).astype(dtype) for row in rows), top


def _bits(x) -> int:
    return int(np.float32(x).view(np.int32))
