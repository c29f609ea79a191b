"""Mamba-2's recurrence of a matrix for each head: in chunks, and for one token.

    S_t = a_t S_{t-1} + k_t v_t^T         o_t = S_t^T q_t

a_t is a decay between 0 and 1. S is [N, P], float32. Heads of a group share queries and keys, so
that products of these are computed once for all of them. A chunk adds to the state what does not
depend on it, so only a sum is sequential.

G counts one tensor rank's groups, H = G R its heads, C the tokens of a chunk.

Source:   Dao & Gu 2024 (2405.21060), section 6: state space duality.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.model.recurrent.chunks import decays, in_chunks, in_sequence
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.recurrence import is_split, state_before


class _Change(NamedTuple):
    """What some tokens do to the state."""

    decay: jax.Array
    """[..., G, R, 1, 1]."""
    added: jax.Array
    """[..., G, R, N, P]."""

    def apply(self, state: jax.Array) -> jax.Array:
        return self.decay * state + self.added


@jax.named_scope("state_space")
def state_space(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    begins: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to complete sequences, each shard of which is in text order.

    Args:     q, k: [B, T/sequence, G, N]. v: [B, T/sequence, H, P]. log_decay: float32
              [B, T/sequence, H]. begins: bool [B, T/sequence], the first tokens of documents, which
              see no earlier state. size: C.
    Returns:  (float32 [B, T/sequence, H, P]; the state after the last token, float32 [B, H, N, P]).
    Communication: that of `state_before` over SEQUENCE: a matrix [N, P] of each row and head.
    """
    B, T, G, N = q.shape
    H, P = v.shape[2:]
    of_decay = decays(log_decay, begins, size)
    by_group = lambda a: a.reshape(*a.shape[:2], G, H // G, *a.shape[3:])  # noqa: E731
    between, since_start, until_end, of_chunk = map(
        by_group, (of_decay.between, of_decay.since_start, of_decay.until_end, of_decay.of_chunk)
    )
    q, k, v = (in_chunks(a.astype(jnp.float32), size) for a in (q, k, v))
    v = by_group(v)
    scores = jnp.einsum("nbgik,nbgjk->nbgij", q, k)[:, :, :, None] * between
    added = jnp.einsum("nbgjk,nbgrjp->nbgrkp", k, until_end[..., None] * v)
    changes = _Change(of_chunk[..., None, None], added)
    empty = varying(jnp.zeros((B, G, H // G, N, P)))
    start = empty
    if is_split():
        after, _ = lax.scan(_one, empty, changes)
        whole = _Change(jnp.prod(changes.decay, axis=0), after)
        start = state_before(whole, _Change.apply, empty)
    state, states = lax.scan(_one, start, changes)
    earlier = since_start[..., None] * jnp.einsum("nbgik,nbgrkp->nbgrip", q, states)
    out = (scores @ v + earlier).reshape(*scores.shape[:2], H, size, P)
    return in_sequence(out, T), state.reshape(B, H, N, P)


def _one(state: jax.Array, change: _Change) -> tuple[jax.Array, jax.Array]:
    return change.apply(state), state


def state_space_step(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to one token.

    Args:     q, k: [B, G, N]. v: [B, H, P]. log_decay: float32 [B, H]. state: float32 [B, H, N, P].
    Returns:  (float32 [B, H, P]; the new state).
    """
    heads = lambda a: jnp.repeat(a.astype(jnp.float32), v.shape[1] // a.shape[1], 1)  # noqa: E731
    state = jnp.exp(log_decay)[..., None, None] * state
    state = state + heads(k)[..., :, None] * v.astype(jnp.float32)[..., None, :]
    return jnp.einsum("bhnp,bhn->bhp", state, heads(q)), state
