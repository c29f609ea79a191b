"""The delta rule with a decay for each channel of the key, in plain JAX and in chunks.

    S_t = Diag(a_t) S_{t-1} + k_t (b_t (v_t - (Diag(a_t) S_{t-1})^T k_t))^T         o_t = S_t^T q_t

As in `reference.py`, the writes of a chunk solve a triangular system, with the numbers

    sum over channels c of   x_ic k_jc exp(s_ic - s_jc)        for j <= i, and x = q or k

where s are sums of logarithms of decays. A chunk has C C K such exponentials. With x_ic exp(s_ic)
and k_jc exp(-s_jc) it would be one matmul, but the second factor overflows where the state decays
fast. So a chunk is cut into halves, again and again: between the tokens of two halves, the decay is
that until the last token m of the first half, times that since then:

    exp(s_ic - s_jc) = exp(s_ic - s_mc) exp(s_mc - s_jc)

Both factors are at most 1, whatever the decays are. Only in tiles of a few tokens is each
exponential computed.

N chunks of C tokens in a sequence, M = N B H of all rows and heads. Operands of products are in the
dtype of queries, keys and values, in float16 in float32, and sums are in float32.

Source:   Kimi Team 2025 (2510.26692), Kimi Linear, section 3; Yang et al. 2023 (2312.06635),
          section 4.3, for the split into smaller chunks where decays differ by channel.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.kernels.recurrence.chunks import (
    LEAST,
    Sums,
    in_chunks,
    in_sequence,
    sums_of,
    unit_lower_inverse,
)
from jaxpar.kernels.recurrence.reference import operands, product, states_between_chunks

f32 = jnp.float32

#: Tokens of a tile.
TILE = 4


class _Tokens(NamedTuple):
    """What decays between two tokens of a chunk follow from, of M chunks."""

    sums: Sums
    """[M, C, K]."""
    document: jax.Array
    """int32 [M, C, 1]: how many documents began in the chunk so far."""

    def at(self, place) -> "_Tokens":
        """Return some of the tokens. Args: place: an index of [M, C, K]."""
        return jax.tree.map(lambda a: a[place], self)


def _between(j: _Tokens, i: _Tokens, mask: jax.Array | bool = True) -> jax.Array:
    """Return what is left at tokens i of what was written at tokens j: between 0 and 1, float32.

    0 if a document begins after j, and where the mask is False.
    """
    total = Sums(*(a - b for a, b in zip(i.sums, j.sums, strict=True))).total
    same_document = (i.document == j.document) & mask
    # Of pairs that are masked, sums may be positive, and exponentials infinite.
    return jnp.where(same_document, jnp.exp(jnp.where(same_document, total, LEAST)), 0.0)


_FIRST, _SECOND = (slice(None), 0), (slice(None), 1)
_LAST = slice(None), slice(-1, None)


def decayed_products(x: jax.Array, keys: jax.Array, t: _Tokens) -> jax.Array:
    """Compute sum_c x_ic keys_jc exp(s_ic - s_jc) for j <= i, and 0 for later tokens j.

    Args:     x, keys: [M, C, K], of one dtype.
    Returns:  float32 [M, C, C].
    """
    M, C = x.shape[:2]
    if C <= TILE or C % 2:
        return _in_tile(x, keys, t)
    halves = jax.tree.map(lambda a: a.reshape(M, 2, C // 2, -1), (x, keys, t))
    (_, of_keys, first), (of_x, _, second) = (
        jax.tree.map(lambda a: a[half], halves)  # noqa: B023
        for half in (_FIRST, _SECOND)
    )
    middle = first.at(_LAST)
    since = of_x.astype(f32) * _between(middle, second)
    until = of_keys.astype(f32) * _between(first, middle)
    across = product("mik,mjk->mij", since.astype(x.dtype), until.astype(x.dtype))
    # A dim for each level would be more dims than XLA's matmuls on CPUs take.
    alone = jax.tree.map(lambda a: a.reshape(2 * M, C // 2, -1), halves)
    within = decayed_products(*alone).reshape(M, 2, C // 2, C // 2)
    rows = (within[_FIRST], jnp.zeros_like(across)), (across, within[_SECOND])
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def _in_tile(x: jax.Array, keys: jax.Array, t: _Tokens) -> jax.Array:
    """`decayed_products`, with the decay of every pair of tokens and every channel."""
    i, j = (slice(None), slice(None), None), (slice(None), None)
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[:, :, None]
    decay = _between(t.at(j), t.at(i), mask)
    return jnp.sum(x[i].astype(f32) * keys[j].astype(f32) * decay, axis=-1)


def delta_rule_by_channel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    begins: jax.Array,
    state: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Apply the delta rule with a decay for each channel of the key.

    Args:     q, k: [B, T, H, K], keys of length 1. v: [B, T, H, V]. log_decay: float32
              [B, T, H, K], of the state before the token, at most 0. rate: float32 [B, T, H].
              begins: bool [B, T], the first tokens of documents, which see no earlier state. state:
              float32 [B, H, K, V], before the first token. size: tokens of a chunk.
    Returns:  (float32 [B, T, H, V]; the state after the last token, float32 [B, H, K, V]).
    """
    T, (B, _, H, _) = q.shape[1], v.shape
    q, k, v = operands(q, k, v)
    dtype, chunks = k.dtype, functools.partial(in_chunks, size=size)
    for_heads = lambda a: jnp.broadcast_to(a, (*a.shape[:2], H, *a.shape[3:]))  # noqa: E731
    begun = for_heads(chunks(begins[:, :, None, None].astype(jnp.int32)))
    M = len(begun) * B * H
    q, k, v, rate, log_decay, begun = (
        a.reshape(M, size, -1) for a in (*map(chunks, (q, k, v, rate[..., None], log_decay)), begun)
    )
    sums = sums_of(log_decay, axis=1)
    t = _Tokens(sums, jnp.cumsum(begun, axis=1))
    since_start = jnp.where(t.document == 0, jnp.exp(sums.total), 0.0)
    until_end = _between(t, t.at(_LAST))

    below = jnp.tril(rate * decayed_products(k, k, t), -1)
    solve = unit_lower_inverse(below).astype(dtype)
    solved = lambda a: product("mij,mjk->mik", solve, a.astype(dtype))  # noqa: E731
    reads = solved(rate * since_start * k.astype(f32)).astype(dtype)
    writes, keys = solved(rate * v.astype(f32)), (until_end * k.astype(f32)).astype(dtype)
    of_chunk = jnp.swapaxes(since_start[_LAST], 1, 2)

    # One head in a group: `states_between_chunks` has a dim for the heads that share keys.
    in_groups = lambda a: a.reshape(-1, B, H, 1, *a.shape[1:])  # noqa: E731
    before, written, last = states_between_chunks(
        *map(in_groups, (reads, writes, keys, of_chunk)), state[:, :, None]
    )
    before, written = (a.reshape(M, *a.shape[4:]) for a in (before, written))
    earlier = (since_start * q.astype(f32)).astype(dtype)
    scores = decayed_products(q, k, t).astype(dtype)
    out = product("mik,mkv->miv", earlier, before) + product("mij,mjv->miv", scores, written)
    return in_sequence(out.reshape(-1, B, H, *out.shape[1:]), T), last[:, :, 0]
