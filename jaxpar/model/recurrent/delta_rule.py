"""The gated delta rule, a recurrence of a matrix for each head: in chunks, and for one token.

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T         o_t = S_t^T q_t

a_t is a decay and b_t a rate, both between 0 and 1. S is [K, V], float32. The update replaces what
the state returns for the key k_t by a mixture of that and v_t, so that a state of K columns can be
rewritten rather than only added to.

Within a chunk, the writes u_t = b_t (v_t - a_t S_{t-1}^T k_t) depend on one another linearly. They
solve a triangular system, whose right-hand side is linear in the state before the chunk:

    (I + A) u = b v - (b k c) S        A_ij = b_i (k_i . k_j) decay_ij for j < i

So both parts are solved for all chunks at once, and only products with S are sequential.

H counts one tensor rank's heads, C the tokens of a chunk and N the chunks.

Source:   Yang et al. 2024 (2412.06464), Gated Delta Networks, section 3; Yang et al. 2024
          (2406.06484) for chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.model.recurrent.chunks import Decays, decays, in_chunks, in_sequence
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.recurrence import is_split, state_before


class _Chunks(NamedTuple):
    """What the sequential part reads of each chunk, [N, B, H, ...] float32."""

    queries: jax.Array
    """[C, K], times the decay since the chunk's start."""
    scores: jax.Array
    """[C, C], of queries and keys, times the decay between them."""
    keys: jax.Array
    """[C, K], times the decay until the chunk's end."""
    reads: jax.Array
    """[C, K]: what the writes subtract of the state before the chunk."""
    writes: jax.Array
    """[C, V], with an empty state before the chunk."""
    decay: jax.Array
    """[]: of the state over the chunk."""


@jax.named_scope("delta_rule")
def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    begins: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to complete sequences, each shard of which is in text order.

    Args:     q, k: [B, T/sequence, H, K], keys of length 1. v: [B, T/sequence, H, V].
              log_decay, rate: float32 [B, T/sequence, H]. begins: bool [B, T/sequence], the first
              tokens of documents, which see no earlier state. size: tokens of a chunk.
    Returns:  (float32 [B, T/sequence, H, V]; the state after the last token, float32 [B, H, K, V]).
    Communication: that of `state_before` over SEQUENCE: a matrix [K, K + V] of each row and head.
    """
    parts = _solved(q, k, v, rate, decays(log_decay, begins, size), size)
    empty = varying(jnp.zeros((*parts.keys.shape[1:3], k.shape[-1], v.shape[-1])))
    before = state_before(_change(parts), _apply, empty) if is_split() else empty

    def one(state: jax.Array, chunk: _Chunks) -> tuple[jax.Array, jax.Array]:
        writes = chunk.writes - chunk.reads @ state
        out = chunk.queries @ state + chunk.scores @ writes
        return _after(state, chunk, writes), out

    state, out = lax.scan(one, before, parts)
    return in_sequence(out, q.shape[1]), state


def _solved(q, k, v, rate, decay: Decays, size: int) -> _Chunks:
    q, k, v, rate = (in_chunks(a.astype(jnp.float32), size) for a in (q, k, v, rate))
    rate, since_start = rate[..., None], decay.since_start[..., None]
    products = lambda a: jnp.einsum("nbhik,nbhjk->nbhij", a, k)  # noqa: E731
    below = jnp.tril(rate * products(k) * decay.between, -1)
    right = jnp.concatenate((rate * since_start * k, rate * v), axis=-1)
    solved = lax.linalg.triangular_solve(
        below + jnp.eye(size), right, left_side=True, lower=True, unit_diagonal=True
    )
    reads, writes = jnp.split(solved, [k.shape[-1]], axis=-1)
    keys = decay.until_end[..., None] * k
    scores = products(q) * decay.between
    return _Chunks(since_start * q, scores, keys, reads, writes, decay.of_chunk[..., None, None])


def _after(state: jax.Array, chunk: _Chunks, writes: jax.Array) -> jax.Array:
    return chunk.decay * state + jnp.swapaxes(chunk.keys, -1, -2) @ writes


def _change(parts: _Chunks) -> jax.Array:
    """Return how these chunks change a state: [B, H, K, K + V], a matrix beside what they add.

    The matrix is what becomes of each unit vector if nothing is written.
    """
    _, B, H, _, K = parts.keys.shape
    width = K + parts.writes.shape[-1]
    start = varying(jnp.broadcast_to(jnp.eye(K, width), (B, H, K, width)))
    beside = jnp.pad(parts.writes, [(0, 0)] * 4 + [(K, 0)])

    def one(state: jax.Array, chunk: tuple[_Chunks, jax.Array]) -> tuple[jax.Array, None]:
        of_chunk, writes = chunk
        return _after(state, of_chunk, writes - of_chunk.reads @ state), None

    return lax.scan(one, start, (parts, beside))[0]


def _apply(change: jax.Array, state: jax.Array) -> jax.Array:
    matrix, added = jnp.split(change, [state.shape[-2]], axis=-1)
    return matrix @ state + added


def delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to one token.

    Args:     q, k: [B, H, K]. v: [B, H, V]. log_decay, rate: float32 [B, H].
              state: float32 [B, H, K, V].
    Returns:  (float32 [B, H, V]; the new state).
    """
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    state = jnp.exp(log_decay)[..., None, None] * state
    write = rate[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * write[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", state, q), state
