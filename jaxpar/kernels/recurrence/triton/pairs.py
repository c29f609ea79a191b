"""The backward's gradients between a chunk's tokens: a program for each chunk and head.

With do the gradient of outputs, y what tokens write, z = M^T dy (`backward.py`), D the decays
between tokens, and b the rates:

    scores   F = (do y^T) D for j < i        own     its diagonal
    solve    E = -(z y^T) D for j < i        dv      b z        given   z . v

A state space has `scores` and `own` only.
"""

import functools

import jax.numpy as jnp

from jaxpar.kernels.attention.refs import Refs
from jaxpar.kernels.attention.triton.compiler import div, f32, launch, mod, program, rows
from jaxpar.kernels.recurrence.triton.shape import (
    ChunkDecays,
    RecurrenceShape,
    below_diagonal,
    product,
    scaled,
)

WARPS = 4


def pair_gradients(s: RecurrenceShape, v, sums, rate, d_out, written, d_written):
    """Return F, own and (E, dv, given), the last None for a state space.

    Args:     written, d_written: y and z, [B, T, H, V] in q's dtype.
    Returns:  F, E: [B, H, N, C, C], dv: [B, T, H, V] in q's dtype; own, given: float32 [B, H, T].
    """
    square, of_tokens = ((s.B, s.H, s.N, s.C, s.C), s.dtype), ((s.B, s.H, s.N * s.C), f32)
    of_rule = [square, (v.shape, s.dtype), of_tokens] if s.delta else []
    scores, own, *found = launch(
        functools.partial(_kernel, s),
        [d_out, written, *sums, *([d_written, v, rate] if s.delta else [])],
        [square, of_tokens, *of_rule],
        programs=s.B * s.N * s.H,
        warps=WARPS,
        stages=1,
        name="recurrence_pair_gradients",
        interpret=s.interpret,
    )
    return scores, own, found or None


def _kernel(s: RecurrenceShape, *refs):
    names = "d_out written coarse fine document {} scores own {}"
    names = names.format(*("d_written v rate", "solve dv given") if s.delta else ("", ""))
    r = Refs(**dict(zip(names.split(), refs, strict=True)))
    h, at = mod(program(), s.H), div(program(), s.H)
    b, n = div(at, s.N), mod(at, s.N)
    here, whole = rows(n * s.C, s.C), rows(0, s.C)
    rate = r.rate[b, h, here] if s.delta else None
    scores = solve = jnp.zeros((s.C, s.C), f32)
    given = jnp.zeros((s.C,), f32)
    for block in range(s.blocks):
        columns = s.columns(block)
        y = r.written[b, here, h, columns]
        scores += product(s, r.d_out[b, here, h, columns], y.T)
        if s.delta:
            z = r.d_written[b, here, h, columns]
            solve += product(s, z, y.T)
            given += jnp.sum(z.astype(f32) * r.v[b, here, h, columns].astype(f32), axis=1)
            r.dv[b, here, h, columns] = scaled(rate, z.astype(f32)).astype(s.dtype)
    between, below = ChunkDecays(s, r, b, n, h).between(), below_diagonal(s.C)
    scores *= between
    r.scores[b, h, n, whole, whole] = jnp.where(below, scores, 0.0).astype(s.dtype)
    r.own[b, h, here] = jnp.sum(jnp.where(below, 0.0, scores), axis=1)
    if s.delta:
        solve = jnp.where(below, -solve * between, 0.0)
        r.solve[b, h, n, whole, whole] = solve.astype(s.dtype)
        r.given[b, h, here] = given
