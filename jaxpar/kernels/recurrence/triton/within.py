"""What a chunk's tokens do to one another, whatever the state before: a program for each chunk.

scores    q_i . k_j times the decay between them, for j <= i
inverse   (I + A)^-1, A_ij = b_i (k_i . k_j) decay_ij for j < i    (the delta rule only)
"""

import functools
from types import SimpleNamespace as Refs

import jax.numpy as jnp

from jaxpar.kernels.attention.triton.compiler import div, f32, iota, launch, mod, program, rows
from jaxpar.kernels.recurrence.triton.shape import (
    ChunkDecays,
    RecurrenceShape,
    TwoParts,
    below_diagonal,
    product,
    scaled,
)

WARPS = 4


def within_chunks(s: RecurrenceShape, q, k, sums, rate):
    """Return scores and inverse, [B, H, N, C, C] in q's dtype; inverse is None without a rate."""
    result = (s.B, s.H, s.N, s.C, s.C), s.dtype
    found = launch(
        functools.partial(_kernel, s),
        [q, k, *sums, *([rate] if s.delta else [])],
        [result] * (2 if s.delta else 1),
        programs=s.B * s.N * s.H,
        warps=WARPS,
        stages=1,
        name="recurrence_within",
        interpret=s.interpret,
    )
    return found if s.delta else (*found, None)


def _kernel(s: RecurrenceShape, *refs):
    names = "q k coarse fine document rate scores inverse"
    if not s.delta:
        names = "q k coarse fine document scores"
    r = Refs(**dict(zip(names.split(), refs, strict=True)))
    # Neighbors compute heads that share queries and keys.
    h, at = mod(program(), s.H), div(program(), s.H)
    b, n, g = div(at, s.N), mod(at, s.N), div(h, s.group)
    here, whole = rows(n * s.C, s.C), rows(0, s.C)
    k = r.k[b, here, g, s.all_keys]
    between = ChunkDecays(s, r, b, n, h).between()
    scores = product(s, r.q[b, here, g, s.all_keys], k.T) * between
    r.scores[b, h, n, whole, whole] = scores.astype(s.dtype)
    if s.delta:
        alike = scaled(r.rate[b, h, here], product(s, k, k.T) * between)
        below = jnp.where(below_diagonal(s.C), alike, 0.0)
        r.inverse[b, h, n, whole, whole] = unit_lower_inverse(s, below).astype(s.dtype)


def unit_lower_inverse(s: RecurrenceShape, below):
    """Invert blocks of 1, 2, 4, ... rows on the diagonal, all at once, as in `chunks.py`.

    With X the inverses of all blocks of a size, X below X has -1 times what joins each pair of
    neighbors, and numbers elsewhere that are left out. So all sizes multiply by the same matrix,
    which stays in shared memory. A tile in Triton cannot be cut.
    """
    i, j = iota(below.shape, 0), iota(below.shape, 1)
    # i and j are in neighboring blocks of `count` rows if the highest bit that differs is `count`.
    apart, count = i ^ j, 1
    inverse = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -below, 0.0)).astype(f32)
    right = TwoParts.of(s, below)
    while (count := 2 * count) < s.C:
        blocks = TwoParts.of(s, inverse)
        joined = TwoParts.of(s, blocks @ right) @ blocks
        inverse -= jnp.where((apart >= count) & (apart < 2 * count), joined, 0.0)
    return inverse


# ------------- The backward's gradients between a chunk's tokens: a program for each chunk and head
#
# With do the gradient of outputs, y what tokens write, z = M^T dy (`backward.py`), D the decays
# between tokens, and b the rates:
#
#     scores   F = (do y^T) D for j < i        own     its diagonal
#     solve    E = -(z y^T) D for j < i        dv      b z        given   z . v
#
# A state space has `scores` and `own` only.


GRADIENT_WARPS = 4


def pair_gradients(s: RecurrenceShape, v, sums, rate, d_out, written, d_written):
    """Return F, own and (E, dv, given), the last None for a state space.

    Args:     written, d_written: y and z, [B, T, H, V] in q's dtype.
    Returns:  F, E: [B, H, N, C, C], dv: [B, T, H, V] in q's dtype; own, given: float32 [B, H, T].
    """
    square, of_tokens = ((s.B, s.H, s.N, s.C, s.C), s.dtype), ((s.B, s.H, s.N * s.C), f32)
    of_rule = [square, (v.shape, s.dtype), of_tokens] if s.delta else []
    scores, own, *found = launch(
        functools.partial(_gradient_kernel, s),
        [d_out, written, *sums, *([d_written, v, rate] if s.delta else [])],
        [square, of_tokens, *of_rule],
        programs=s.B * s.N * s.H,
        warps=GRADIENT_WARPS,
        stages=1,
        name="recurrence_pair_gradients",
        interpret=s.interpret,
    )
    return scores, own, found or None


def _gradient_kernel(s: RecurrenceShape, *refs):
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
