"""Recurrences over complete sequences, by the backend that `capability.choose` returns.

A backend is a module with the functions `delta_rule` and `state_space`, whose arguments are those
here but for the name of the backend.

    B rows   T tokens   G heads of queries and keys   H heads, a multiple of G   [K, V] a state
"""

from types import ModuleType

import jax

from jaxpar.kernels.platform import imported_when_used
from jaxpar.kernels.recurrence import reference
from jaxpar.kernels.recurrence.capability import Shape, choose

BACKENDS: dict[str, ModuleType] = {
    # Pallas takes a part of a program's import time, and only GPUs need it.
    "triton": imported_when_used("jaxpar.kernels.recurrence.triton.api"),
    "reference": reference,
}


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    begins: jax.Array,
    state: jax.Array,
    size: int,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule:

        S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T         o_t = S_t^T q_t

    Args:     q, k: [B, T, G, K], keys of length 1. v: [B, T, H, V]. Head h of v has the queries and
              keys of head h // (H / G). log_decay, rate: float32 [B, T, H], log a and b. begins:
              bool [B, T], the first tokens of documents, which see no earlier state. state:
              float32 [B, H, K, V], before the first token. size: tokens of a chunk. backend:
              "auto", or a name in BACKENDS.
    Returns:  (float32 [B, T, H, V], which `triton` rounds to v's dtype; the state after the last
              token, float32 [B, H, K, V]).
    Raises:   ValueError if a named backend cannot compute the call.
    Source:   Yang et al. 2024 (2412.06464), section 3.
    """
    by = BACKENDS[choose(backend, Shape.of(k, v, size))]
    return by.delta_rule(q, k, v, log_decay, rate, begins, state, size)


def state_space(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    begins: jax.Array,
    state: jax.Array,
    size: int,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Apply Mamba-2's recurrence:

        S_t = a_t S_{t-1} + k_t v_t^T         o_t = S_t^T q_t

    Args, Returns, Raises: as `delta_rule`.
    Source:   Dao & Gu 2024 (2405.21060), section 6.
    """
    by = BACKENDS[choose(backend, Shape.of(k, v, size))]
    return by.state_space(q, k, v, log_decay, begins, state, size)
