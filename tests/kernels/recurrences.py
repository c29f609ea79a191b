"""Inputs of recurrences, and their outputs and gradients by any backend."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

NAMES = ("out", "last", "dq", "dk", "dv", "d_log_decay", "d_rate", "d_state")


@dataclass(frozen=True)
class Case:
    """A call. rule: "delta_rule", the same "by_channel", or "state_space". documents: per token."""

    rule: str = "delta_rule"
    B: int = 1
    T: int = 40
    G: int = 1
    H: int = 2
    K: int = 16
    V: int = 32
    C: int = 16
    decay: float = 1.0
    documents: float = 0.1
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.rule}-{self.T}-{self.G}-{self.H}-{self.K}-{self.V}-{self.C}-{self.dtype}"


@functools.cache
def inputs_of(case: Case):
    """q, k, v, log_decay, rate, begins, state; and weights of the outputs in a loss."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    B, T, H = case.B, case.T, case.H
    q, k, v = (normal(B, T, n, w) for n, w in ((case.G, case.K),) * 2 + ((H, case.V),))
    k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
    each = (case.K,) if case.rule == "by_channel" else ()
    log_decay = -case.decay * jax.nn.softplus(normal(B, T, H, *each))
    rate, begins = jax.nn.sigmoid(normal(B, T, H)), jnp.asarray(rng.random((B, T)) < case.documents)
    state, d_out, d_last = (normal(B, H, n, case.V) for n in (case.K, T, case.K))
    q, k, v = (a.astype(case.dtype) for a in (q, k, v))
    return (q, k, v, log_decay, rate, begins, state), (jnp.swapaxes(d_out, 1, 2), d_last)


def run(function, case: Case, dtype: str | None = None) -> list[np.ndarray]:
    """NAMES, by a backend's function. Args: dtype: of q, k and v; that of the case by default."""
    (q, k, v, log_decay, rate, begins, state), weights = inputs_of(case)
    q, k, v = (a.astype(dtype or case.dtype) for a in (q, k, v))

    def total(q, k, v, log_decay, rate, state):
        of_rule = () if case.rule == "state_space" else (rate,)
        found = function(q, k, v, log_decay, *of_rule, begins, state, case.C)
        return sum(jnp.sum(a * w) for a, w in zip(found, weights, strict=True)), found

    program = jax.jit(jax.value_and_grad(total, range(6), has_aux=True))
    (_, found), gradients = program(q, k, v, log_decay, rate, state)
    return [np.asarray(a, np.float64) for a in (*found, *gradients)]


def by_token(q, k, v, log_decay, rate, begins, state, size: int):
    """`delta_rule`, also by channel, one token after the other; and the last state."""
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    q, k = (jnp.repeat(a, v.shape[2] // a.shape[2], axis=2) for a in (q, k))

    def one(state, token):
        q, k, v, decay, rate, begins = token
        state = jnp.where(begins[:, None, None, None], 0.0, decay[..., None] * state)
        known = jnp.einsum("bhkv,bhk->bhv", state, k)
        state = state + jnp.einsum("bhk,bhv->bhkv", k, rate[..., None] * (v - known))
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    tokens = [jnp.moveaxis(a, 1, 0) for a in (q, k, v, jnp.exp(log_decay), rate, begins)]
    state, out = jax.lax.scan(one, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def errors(found, wanted) -> dict[str, float]:
    """Largest error of each array, relative to its largest number."""
    pairs = zip(NAMES, found, wanted, strict=True)
    return {name: np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for name, a, b in pairs}
