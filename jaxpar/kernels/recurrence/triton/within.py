"""What a chunk's tokens do to one another, whatever the state before: a program for each chunk.

    scores    q_i . k_j times the decay between them, for j <= i
    inverse   (I + A)^-1, A_ij = b_i (k_i . k_j) decay_ij for j < i    (the delta rule only)

The inverse is that of `inverse.unit_lower_inverse`, by masks: a tile in Triton cannot be cut.
"""

import functools

import jax.numpy as jnp

from jaxpar.kernels.attention.refs import Refs
from jaxpar.kernels.attention.triton.compiler import (
    div,
    dot,
    f32,
    iota,
    launch,
    mod,
    program,
    rows,
    spread,
)
from jaxpar.kernels.recurrence.triton.shape import (
    ChunkDecays,
    RecurrenceShape,
    below_diagonal,
    product,
)


def within_chunks(s: RecurrenceShape, q, k, sums, rate):
    """Return scores and inverse, [B, H, N, C, C] in q's dtype; inverse is None without a rate."""
    result = (s.B, s.H, s.N, s.C, s.C), s.dtype
    found = launch(
        functools.partial(_kernel, s),
        [q, k, *sums, *([rate] if s.delta else [])],
        [result] * (2 if s.delta else 1),
        programs=s.B * s.N * s.H,
        warps=4,
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
        rate = spread(r.rate[b, h, here], (s.C, s.C), 0)
        below = jnp.where(below_diagonal(s.C), rate * product(s, k, k.T) * between, 0.0)
        r.inverse[b, h, n, whole, whole] = _unit_lower_inverse(s, below).astype(s.dtype)


def _unit_lower_inverse(s: RecurrenceShape, below):
    """Invert blocks of 1, 2, 4, ... rows on the diagonal, all at once.

    With operands of 16 bits, whose rounding is larger, products round to TF32.
    """
    shape, tf32 = below.shape, s.dtype != f32
    i, j = iota(shape, 0), iota(shape, 1)
    inverse, count = jnp.where(i == j, 1.0, 0.0).astype(f32), 1
    while count < s.C:
        joins = (div(i, 2 * count) == div(j, 2 * count)) & (div(i, count) > div(j, count))
        joined = jnp.where(joins, below, 0.0)
        if count > 1:
            joined = dot(dot(inverse, joined, tf32), inverse, tf32)
        inverse, count = inverse - joined, 2 * count
    return inverse
