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

N chunks of C tokens. Operands of products are in the dtype of queries, keys and values, in float16
in float32, and sums are in float32.

Source:   Kimi Team 2025 (2510.26692), Kimi Linear, section 3; Yang et al. 2023 (2312.06635),
          section 4.3, for the split into smaller chunks where decays differ by channel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.kernels.recurrence.chunks import LEAST, Sums, in_chunks, in_sequence, sums_of
from jaxpar.kernels.recurrence.inverse import unit_lower_inverse
from jaxpar.kernels.recurrence.reference import operands, product, states_between_chunks

f32 = jnp.float32

#: Tokens of a tile.
TILE = 8


class _Tokens(NamedTuple):
    """What decays between two tokens of a chunk follow from, with tokens in the dim before last."""

    sums: Sums
    """[..., C, K]."""
    document: jax.Array
    """int32 [..., C, 1]: how many documents began in the chunk so far."""

    def at(self, place) -> "_Tokens":
        """Return some of the tokens. Args: place: an index of [..., C, K]."""
        return jax.tree.map(lambda a: a[place], self)

    def halves(self) -> "_Tokens":
        """Return [..., 2, C / 2, K]."""
        return jax.tree.map(_halves, self)


def _halves(a: jax.Array) -> jax.Array:
    return a.reshape(*a.shape[:-2], 2, a.shape[-2] // 2, a.shape[-1])


def _between(j: _Tokens, i: _Tokens, mask: jax.Array | bool = True) -> jax.Array:
    """Return what is left at tokens i of what was written at tokens j: between 0 and 1, float32.

    0 if a document begins after j, and where the mask is False.
    """
    total = Sums(*(a - b for a, b in zip(i.sums, j.sums, strict=True))).total
    alike = (i.document == j.document) & mask
    # Of pairs that are masked, sums may be positive, and exponentials infinite.
    return jnp.where(alike, jnp.exp(jnp.where(alike, total, LEAST)), 0.0)


_FIRST, _SECOND = (..., 0, slice(None), slice(None)), (..., 1, slice(None), slice(None))
_LAST, _ROWS, _COLUMNS = (..., slice(-1, None), slice(None)), (..., None, slice(None)), ...


def decayed_products(x: jax.Array, keys: jax.Array, t: _Tokens) -> jax.Array:
    """Compute sum_c x_ic keys_jc exp(s_ic - s_jc) for j <= i, and 0 for later tokens j.

    Args:     x, keys: [..., C, K], of one dtype. t: the tokens, which may lack leading dims of x.
    Returns:  float32 [..., C, C].
    """
    C = x.shape[-2]
    if C <= TILE or C % 2:
        return _in_tile(x, keys, t)
    of_x, of_keys, halves = _halves(x), _halves(keys), t.halves()
    first, second = halves.at(_FIRST), halves.at(_SECOND)
    middle = first.at(_LAST)
    since = of_x[_SECOND].astype(f32) * _between(middle, second)
    until = of_keys[_FIRST].astype(f32) * _between(first, middle)
    across = product("...ik,...jk->...ij", since.astype(x.dtype), until.astype(x.dtype))
    within = decayed_products(of_x, of_keys, halves)
    rows = (within[_FIRST], jnp.zeros_like(across)), (across, within[_SECOND])
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def _in_tile(x: jax.Array, keys: jax.Array, t: _Tokens) -> jax.Array:
    """`decayed_products`, with the decay of every pair of tokens and every channel."""
    C = x.shape[-2]
    i, j = (..., slice(None), None, slice(None)), (..., None, slice(None), slice(None))
    mask = jnp.tril(jnp.ones((C, C), bool))[:, :, None]
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
    T = q.shape[1]
    q, k, v = operands(q, k, v)
    dtype = k.dtype
    q, k, v = (in_chunks(a, size) for a in (q, k, v))
    rate = in_chunks(rate, size)[..., None]
    begun = in_chunks(begins[:, :, None, None].astype(jnp.int32), size)
    sums = sums_of(in_chunks(log_decay, size), axis=-2)
    t = _Tokens(sums, jnp.cumsum(begun, axis=-2))
    since_start = jnp.where(t.document == 0, jnp.exp(sums.total), 0.0)
    until_end = _between(t, t.at(_LAST))

    below = jnp.tril(rate * decayed_products(k, k, t), -1)
    solve = unit_lower_inverse(below).astype(dtype)
    solved = lambda a: product("nbhij,nbhjk->nbhik", solve, a.astype(dtype))  # noqa: E731
    reads = solved(rate * since_start * k.astype(f32)).astype(dtype)
    writes, keys = solved(rate * v.astype(f32)), (until_end * k.astype(f32)).astype(dtype)
    of_chunk = jnp.swapaxes(since_start[_LAST], -1, -2)

    # One head in a group: `states_between_chunks` has a dim for the heads that share keys.
    alone = lambda a: a[:, :, :, None]  # noqa: E731
    before, written, last = states_between_chunks(
        *map(alone, (reads, writes, keys, of_chunk)), state[:, :, None]
    )
    before, written = before[:, :, :, 0], written[:, :, :, 0]
    earlier = (since_start * q.astype(f32)).astype(dtype)
    scores = decayed_products(q, k, t).astype(dtype)
    out = product("nbhik,nbhkv->nbhiv", earlier, before)
    out += product("nbhij,nbhjv->nbhiv", scores, written)
    return in_sequence(out, T), last[:, :, 0]
