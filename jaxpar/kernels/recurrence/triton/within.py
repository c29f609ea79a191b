"""What a chunk's tokens do to one another, whatever the state before: a program for each chunk.

scores    q_i . k_j times the decay between them, for j <= i
inverse   (I + A)^-1, A_ij = b_i (k_i . k_j) decay_ij for j < i    (the delta rule only)
"""

import functools

import jax.numpy as jnp

from jaxpar.kernels.attention.refs import Refs
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
    """Invert blocks of 1, 2, 4, ... rows on the diagonal, all at once, as in `inverse.py`.

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
