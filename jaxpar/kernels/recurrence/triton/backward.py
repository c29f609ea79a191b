"""The backward of a recurrence: the gradients of states, then those of its inputs.

With S the state before a chunk, X the gradient of the state after it, M the inverse of
`within.py`, P its scores, c, e and d the decays since the start, until the end and of the chunk:

    y = M (b (v - c (k S)))      o = c (q S) + P y        S' = d S + k^T (e y)

`state_gradients` walks from the last chunk to the first, with X in registers:

    dy = P^T do + e (k X)        z = M^T dy               X' = d X + q^T (c do) - k^T (c b z)

`pairs.py`, then `gradients`, compute all chunks at once. dM never appears, because M's argument A
has the gradient -M^T dM M^T = -z y^T. So with D the decays between tokens, F = (do y^T) D for
j <= i, and E = -(z y^T) D for j < i:

    dq = c (do S^T) + F k
    dk = reads + writes        reads = b u,  u = E k - c (z S^T)
                               writes = e (y X^T) + F^T q + (b E)^T k
    dv = b z                   db = z . v + k . u

A sum of logarithms of decays multiplies what its token reads, and divides what it writes:

    q . dq + k . reads - k . writes

and at the chunk's last token also d (S . X) and the sum of k . e (y X^T). What a token writes and
reads itself does not decay, and is left out: it would cancel, but for its rounding. A state space
has y = v, so that dv = dy, and nothing with b, z or E.
"""

import functools
from types import SimpleNamespace as Refs
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.kernels.attention.triton.compiler import (
    div,
    f32,
    launch,
    loop,
    mod,
    program,
    rows,
)
from jaxpar.kernels.recurrence.triton.shape import (
    ChunkDecays,
    RecurrenceShape,
    product,
    scaled,
)

#: Warps of a program, and stages of the pipeline of loads: with and without the delta rule.
STATES_WARPS, STATES_STAGES = 4, {True: 3, False: 2}
GRADIENTS_WARPS, GRADIENTS_STAGES = {True: 8, False: 4}, 2

#: Columns of K of a program of `gradients`: with 128, its sums do not fit into registers.
KEY_COLUMNS = 64


def state_gradients(s: RecurrenceShape, q, k, sums, rate, scores, inverse, d_out, d_last):
    """Return the gradients of the states after each chunk, z, and the gradient of the first state.

    Args:     d_out: [B, T, H, V] in q's dtype. d_last: float32 [B, H, K, V].
    Returns:  ([B, H, N, K, V], [B, T, H, V] in q's dtype: z, or dy for a state space; float32
              [B, H, K, V]).
    """
    after = (s.B, s.H, s.N, s.K, s.V), s.dtype
    return launch(
        functools.partial(_states_kernel, s),
        [q, k, *sums, *([rate, inverse] if s.delta else []), scores, d_out, d_last],
        [after, (d_out.shape, s.dtype), (d_last.shape, f32)],
        programs=s.B * s.H * s.blocks,
        warps=STATES_WARPS,
        stages=STATES_STAGES[s.delta],
        name="recurrence_state_gradients",
        interpret=s.interpret,
    )


def _states_kernel(s: RecurrenceShape, *refs):
    of_rule = " rate inverse" if s.delta else ""
    names = f"q k coarse fine document{of_rule} scores d_out d_last d_states d_written d_first"
    r = Refs(**dict(zip(names.split(), refs, strict=True)))
    columns, lane = s.columns(mod(program(), s.blocks)), div(program(), s.blocks)
    b, h = div(lane, s.H), mod(lane, s.H)
    g, whole = div(h, s.group), rows(0, s.C)

    def one(i, d_state):
        n = s.N - 1 - i
        here, at = rows(n * s.C, s.C), ChunkDecays(s, r, b, n, h)
        q, k = (ref[b, here, g, s.all_keys] for ref in (r.q, r.k))
        d_out = r.d_out[b, here, h, columns]
        r.d_states[b, h, n, s.all_keys, columns] = d_state.astype(s.dtype)
        d_written = product(s, r.scores[b, h, n, whole, whole].T, d_out)
        d_written += scaled(at.until_end, product(s, k, d_state))
        d_before = product(s, q.T, scaled(at.since_start, d_out.astype(f32)))
        if s.delta:
            d_written = product(s, r.inverse[b, h, n, whole, whole].T, d_written)
            read = scaled(at.since_start * r.rate[b, h, here], d_written)
            d_before -= product(s, k.T, read)
        r.d_written[b, here, h, columns] = d_written.astype(s.dtype)
        return at.of_chunk * d_state + d_before

    last = r.d_last[b, h, s.all_keys, columns]
    r.d_first[b, h, s.all_keys, columns] = loop(0, s.N, one, last)


def gradients(
    s: RecurrenceShape, q, k, sums, rate, d_out, before, written, d_states, d_written, of_pairs
):
    """Return the gradients of queries, keys, sums and rate; the last without z . v.

    Args:     before: the states before each chunk. written: what tokens write, y. of_pairs: F, its
              diagonal and E, by `pairs.pair_gradients`.
    Returns:  (dq, dk [B, T, G, K] in their dtype; of sums and rate, float32 [B, H, T]; the last is
              None for a state space).
    """
    parts = max(s.K // KEY_COLUMNS, 1)
    of_tokens = (parts, s.B, s.H, s.N * s.C), f32
    scores, own, solve = of_pairs
    inner = jnp.sum(before.astype(f32) * d_states.astype(f32), axis=(-2, -1))
    of_rule = [rate, d_written, solve] if s.delta else []
    found = launch(
        functools.partial(_gradients_kernel, s, parts),
        [q, k, *sums, d_out, before, written, d_states, scores, own, inner, *of_rule],
        [(q.shape, s.dtype), (k.shape, s.dtype), *[of_tokens] * (2 if s.delta else 1)],
        programs=s.B * s.N * s.G * parts,
        warps=GRADIENTS_WARPS[s.delta],
        stages=GRADIENTS_STAGES,
        name="recurrence_gradients",
        interpret=s.interpret,
    )
    dq, dk, *per_token = found
    d_sums, d_rate = (*(jnp.sum(x, axis=0) for x in per_token), None)[:2]
    return dq, dk, d_sums, d_rate


def _gradients_kernel(s: RecurrenceShape, parts: int, *refs):
    """Compute a part of the columns of K, for all heads that share queries and keys."""
    names = (
        "q k coarse fine document d_out states written d_states scores own inner {} dq dk d_sums {}"
    )
    names = names.format(*("rate d_written solve", "d_rate") if s.delta else ("", ""))
    r = Refs(**dict(zip(names.split(), refs, strict=True)))
    part, at = mod(program(), parts), div(program(), parts)
    g, at = mod(at, s.G), div(at, s.G)
    b, n = div(at, s.N), mod(at, s.N)
    here, columns = rows(n * s.C, s.C), rows(part * (s.K // parts), s.K // parts)
    q, k = (ref[b, here, g, columns] for ref in (r.q, r.k))

    def add_head(i, carry):
        h = g * s.group + i
        of_states = _through_states(s, r, (b, h, n, here), columns, s.K // parts)
        dq, dk, d_sums, d_rate = _of_head(s, r, (b, h, n, here), part, q, k, of_states)
        r.d_sums[part, b, h, here] = d_sums
        if s.delta:
            r.d_rate[part, b, h, here] = d_rate
        return carry[0] + dq, carry[1] + dk

    zeros = jnp.zeros((s.C, s.K // parts), f32)
    dq, dk = loop(0, s.group, add_head, (zeros, zeros))
    r.dq[b, here, g, columns] = dq.astype(s.dtype)
    r.dk[b, here, g, columns] = dk.astype(s.dtype)


class _Sums(NamedTuple):
    """Sums over the columns of V, float32. The last is for the delta rule only."""

    queries: Any
    """do S^T, [C, K]."""
    keys: Any
    """y X^T, [C, K]."""
    reads: Any = None
    """z S^T, [C, K]."""


def _through_states(s: RecurrenceShape, r: Refs, where, columns, count: int) -> _Sums:
    """Sum over blocks of V. Args: columns: `count` columns of K."""
    b, h, n, here = where

    def add_block(block, sums: _Sums) -> _Sums:
        values = s.columns(block)
        before, after = (ref[b, h, n, columns, values] for ref in (r.states, r.d_states))
        d_out, y = (ref[b, here, h, values] for ref in (r.d_out, r.written))
        found = _Sums(product(s, d_out, before.T), product(s, y, after.T))
        if s.delta:
            found = found._replace(reads=product(s, r.d_written[b, here, h, values], before.T))
        return jax.tree.map(jnp.add, sums, found)

    wide = jnp.zeros((s.C, count), f32)
    start = _Sums(wide, wide, wide if s.delta else None)
    if s.blocks == 1:  # so that the loop over heads is the one whose loads Triton starts early
        return add_block(0, start)
    return loop(0, s.blocks, add_block, start)


def _of_head(s: RecurrenceShape, r: Refs, where, part, q, k, by_states: _Sums):
    """Return a head's dq, dk, and the gradients of sums and of the rate (without z . v)."""
    b, h, n, here = where
    x, whole = ChunkDecays(s, r, b, n, h), rows(0, s.C)
    of_row = lambda a: jnp.sum(a, axis=1)  # noqa: E731
    q32, k32 = q.astype(f32), k.astype(f32)
    scores, own = r.scores[b, h, n, whole, whole], r.own[b, h, here]
    dq = scaled(x.since_start, by_states.queries) + product(s, scores, k)
    until_end, writes = scaled(x.until_end, by_states.keys), product(s, scores.T, q)
    of_end = jnp.where(x.is_last, 0.0, of_row(until_end * k32))
    inner = jnp.where(part == 0, r.inner[b, h, n], 0.0)
    at_end = jnp.sum(of_end, axis=0) + x.of_chunk * inner
    d_sums = jnp.where(x.is_last, at_end, 0.0) - of_end
    d_rate, reads = None, None
    if s.delta:
        rate, solve = r.rate[b, h, here], r.solve[b, h, n, whole, whole]
        u = product(s, solve, k) - scaled(x.since_start, by_states.reads)
        writes += product(s, scaled(rate, solve.astype(f32)).astype(s.dtype).T, k)
        d_rate, reads = of_row(u * k32), scaled(rate, u)
        d_sums += rate * d_rate
    d_sums += of_row(dq * q32 - writes * k32)
    dk = until_end + scaled(own, q32) + writes
    return dq + scaled(own, k32), dk if reads is None else dk + reads, d_sums, d_rate
