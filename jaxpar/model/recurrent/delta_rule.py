"""The gated delta rule, a recurrence of a matrix for each head: in chunks, and for one token.

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T         o_t = S_t^T q_t

a_t is a decay and b_t a rate, both between 0 and 1. S is [K, V], float32. The update replaces what
the state returns for the key k_t by a mixture of that and v_t, so that a state of K columns can be
rewritten rather than only added to. In Kimi Delta Attention, a_t is a decay for each of the K
channels, a diagonal matrix.

`kernels/recurrence` computes chunks of tokens. Here is what a sharded sequence needs besides.

G counts one tensor rank's key heads and H its heads, a multiple of G.

Source:   Yang et al. 2024 (2412.06464), Gated Delta Networks, section 3; Kimi Team 2025
          (2510.26692), section 3.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention
from jaxpar.kernels import recurrence
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.recurrence import is_split, state_before

#: (values, the state before the first token) -> (outputs, the state after the last one).
type Run = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@jax.named_scope("delta_rule")
def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    begins: jax.Array,
    size: int,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to complete sequences, each shard of which is in text order.

    Args:     q, k: [B, T/sequence, G, K], keys of length 1. v: [B, T/sequence, H, V].
              log_decay, rate: float32 [B, T/sequence, H]. begins: bool [B, T/sequence], the first
              tokens of documents, which see no earlier state. size: tokens of a chunk. backend:
              that of `kernels.recurrence.delta_rule`.
    Returns:  (float32 [B, T/sequence, H, V]; the state after the last token, float32 [B, H, K, V]).
    Communication: that of `state_before` over SEQUENCE: a matrix [K, K + V] of each row and head.
    """

    def run(v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return recurrence.delta_rule(q, k, v, log_decay, rate, begins, state, size, backend)

    return _over_shards(run, k, v)


@jax.named_scope("delta_rule")
def delta_rule_by_channel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    begins: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence with a decay for each channel, as `delta_rule`, by plain JAX.

    Args:     q, k: [B, T/sequence, H, K]. log_decay: float32 [B, T/sequence, H, K]. Others, Returns
              and Communication: as `delta_rule`.
    """

    def run(v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return recurrence.delta_rule_by_channel(q, k, v, log_decay, rate, begins, state, size)

    return _over_shards(run, k, v)


def _over_shards(run: Run, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Run this shard of the sequence from the state after the shards before it."""
    state = varying(jnp.zeros((*v.shape[::2], k.shape[-1], v.shape[-1])))
    if is_split():
        state = state_before(_change(run, v, state), _apply, state)
    return run(v, state)


def _change(run: Run, v: jax.Array, state: jax.Array) -> jax.Array:
    """Return how these tokens change a state: [B, H, K, K + V], a matrix beside what they add.

    The matrix is what becomes of each unit vector if nothing is written.
    """
    K = state.shape[-2]
    start = jnp.broadcast_to(jnp.eye(K, K + v.shape[-1]), (*state.shape[:-1], K + v.shape[-1]))
    return run(jnp.pad(v, [(0, 0)] * 3 + [(K, 0)]), varying(start))[1]


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

    Args:     q, k: [B, G, K]. v: [B, H, V]. log_decay, rate: float32 [B, H]. log_decay may be
              [B, H, K], of each channel. state: float32 [B, H, K, V].
    Returns:  (float32 [B, H, V]; the new state).
    """
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    q, k = (jnp.repeat(a, v.shape[1] // a.shape[1], axis=1) for a in (q, k))
    decay = jnp.exp(log_decay)
    state = jnp.expand_dims(decay, tuple(range(decay.ndim, state.ndim))) * state
    write = rate[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * write[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", state, q), state


# ---------- The heads of a delta rule: queries, keys and values, from the output of the convolution


#: Added to the squared length of queries and keys.
_EPS = 1e-6


def delta_heads(
    mixed: jax.Array, keys: int, a: GatedDeltaNet | KimiDeltaAttention, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys [B, T, G, K] and values [B, T, H, V].

    Args:     mixed: float32 [B, T, C]. keys: the channels of all keys, G K.
              dtype: of the result, the compute dtype.
    """
    q, k, v = jnp.split(jax.nn.silu(mixed), [keys, 2 * keys], axis=-1)
    by_head = lambda x, dim: x.reshape(*x.shape[:2], -1, dim)  # noqa: E731
    q, k = (_unit(by_head(x, a.key_head_dim)) for x in (q, k))
    v = by_head(v, a.value_head_dim)
    q = q / math.sqrt(a.key_head_dim)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + _EPS)
