"""Mamba-2's recurrence of a matrix for each head: in chunks, and for one token.

    S_t = a_t S_{t-1} + k_t v_t^T         o_t = S_t^T q_t

a_t is a decay between 0 and 1. S is [N, P], float32. Heads of a group share queries and keys, so
that products of these are computed once for all of them. `kernels/recurrence` computes chunks of
tokens. Here is what a sharded sequence needs besides.

G counts one tensor rank's groups, H its heads, a multiple of G.

Source:   Dao & Gu 2024 (2405.21060), section 6: state space duality.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.kernels import recurrence
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.recurrence import is_split, state_before


class _Change(NamedTuple):
    """What some tokens do to the state."""

    decay: jax.Array
    """[B, H, 1, 1]."""
    added: jax.Array
    """[B, H, N, P]."""

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
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to complete sequences, each shard of which is in text order.

    Args:     q, k: [B, T/sequence, G, N]. v: [B, T/sequence, H, P]. log_decay: float32
              [B, T/sequence, H]. begins: bool [B, T/sequence], the first tokens of documents, which
              see no earlier state. size: tokens of a chunk. backend: that of
              `kernels.recurrence.state_space`.
    Returns:  (float32 [B, T/sequence, H, P]; the state after the last token, float32 [B, H, N, P]).
    Communication: that of `state_before` over SEQUENCE: a matrix [N, P] of each row and head.
    """

    def run(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return recurrence.state_space(q, k, v, log_decay, begins, state, size, backend)

    state = varying(jnp.zeros((*v.shape[::2], q.shape[-1], v.shape[-1])))
    if is_split():
        whole = jnp.exp(jnp.sum(log_decay, axis=1))
        kept = jnp.where(jnp.any(begins, axis=1)[:, None], 0.0, whole)[..., None, None]
        state = state_before(_Change(kept, run(state)[1]), _Change.apply, state)
    return run(state)


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
