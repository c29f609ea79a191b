"""Recurrent mixers in plain jax.numpy, token by token, without chunks."""

import jax
import jax.numpy as jnp

from jaxpar.components.model import Model
from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from jaxpar.model.plain.operations import Weights, times, unit_rms


def delta_net(
    a: GatedDeltaNet, h, w: Weights, positions, segments, model: Model, watch
) -> jax.Array:
    """Compute Gated DeltaNet.

    Source:   Yang et al. 2024 (2412.06464).
    """
    begins = begins_of(segments)
    q, k, v = (
        jax.nn.silu(convolve(times(h, w, f"delta_{n}"), w[f"delta_conv_{n}"], begins))
        for n in "qkv"
    )
    v = v.reshape(*v.shape[:2], a.num_value_heads, -1)
    served = a.num_value_heads // a.num_key_heads
    q, k = (jnp.repeat(_unit(x), served, axis=2) for x in (q, k))
    by_head = lambda n: times(h, w, f"delta_{n}").reshape(*v.shape[:3], -1)  # noqa: E731
    rate = (1 + a.allow_neg_eigval) * jax.nn.sigmoid(by_head("b")[..., 0])
    step = jax.nn.softplus(by_head("a")[..., 0] + w["delta_dt_bias"])
    decay = jnp.exp(-jnp.exp(w["delta_a_log"]) * step)
    out = delta_rule(q / q.shape[-1] ** 0.5, k, v, decay, rate, begins)
    out = unit_rms(out, a.norm_eps) * w["delta_norm"] * jax.nn.silu(by_head("z"))
    return times(out, w, "delta_out", 2)


def kimi_delta(
    a: KimiDeltaAttention, h, w: Weights, positions, segments, model: Model, watch
) -> jax.Array:
    """Compute Kimi Delta Attention.

    Source:   Kimi Team 2025 (2510.26692).
    """
    begins = begins_of(segments)
    q, k, v = (
        jax.nn.silu(convolve(times(h, w, f"kda_{n}"), w[f"kda_conv_{n}"], begins)) for n in "qkv"
    )
    step, gate = (jnp.tensordot(times(h, w, f"kda_{n}_a"), w[f"kda_{n}_b"], 1) for n in "fg")
    step = jax.nn.softplus(step + w["kda_dt_bias"])
    decay = jnp.exp(-jnp.exp(w["kda_a_log"])[:, None] * step)
    rate = jax.nn.sigmoid(times(h, w, "kda_b"))
    out = delta_rule(_unit(q) / q.shape[-1] ** 0.5, _unit(k), v, decay, rate, begins)
    out = unit_rms(out, a.norm_eps) * w["kda_norm"] * jax.nn.sigmoid(gate)
    return times(out, w, "kda_out", 2)


def mamba(a: Mamba2, h, w: Weights, positions, segments, model: Model, watch) -> jax.Array:
    """Compute Mamba-2.

    Source:   Dao & Gu 2024 (2405.21060).
    """
    begins = begins_of(segments)
    x, key, query = (
        jax.nn.silu(
            convolve(times(h, w, f"mamba_{n}"), w[f"mamba_conv_{n}"], begins) + w[f"mamba_bias_{n}"]
        )
        for n in "xbc"
    )
    step = jax.nn.softplus(times(h, w, "mamba_dt") + w["mamba_dt_bias"])
    step = jnp.maximum(step, a.min_step)
    key, query = (jnp.repeat(y, a.num_heads // a.num_groups, axis=2) for y in (key, query))
    decay = jnp.exp(-jnp.exp(w["mamba_a_log"]) * step)
    out = state_space(query, key, step[..., None] * x, decay, begins)
    out = out + w["mamba_d"][:, None] * x
    out = out * jax.nn.silu(times(h, w, "mamba_z"))
    groups = out.reshape(*out.shape[:2], a.num_groups, -1)
    out = unit_rms(groups, a.norm_eps).reshape(out.shape) * w["mamba_norm"]
    return times(out, w, "mamba_out", 2)


def _unit(x):
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def state_space(q, k, v, decay, begins) -> jax.Array:
    """Apply Mamba-2's recurrence to one token after the other. Arguments as in `delta_rule`."""

    def one(state, token):
        q, k, v, decay, begins = token
        state = jnp.where(begins[:, None, None, None], 0.0, state)
        state = decay[:, :, None, None] * state + jnp.einsum("bhn,bhp->bhnp", k, v)
        return state, jnp.einsum("bhnp,bhn->bhp", state, q)

    B, _, H, N = q.shape
    tokens = [jnp.moveaxis(a, 1, 0) for a in (q, k, v, decay, begins)]
    nothing = jnp.zeros((B, H, N, v.shape[-1]), v.dtype)
    return jnp.moveaxis(jax.lax.scan(one, nothing, tokens)[1], 0, 1)


def delta_rule(q, k, v, decay, rate, begins, state=None) -> jax.Array:
    """Apply the gated delta rule to one token after the other.

    Args:     q, k: [B, T, H, K]. v: [B, T, H, V]. decay, rate: [B, T, H]. decay may be
              [B, T, H, K], of each channel. begins: bool [B, T]. state: [B, H, K, V] before the
              first token; None for zeros.
    Returns:  [B, T, H, V].
    """
    B, _, H, K = q.shape
    state = jnp.zeros((B, H, K, v.shape[-1]), v.dtype) if state is None else state
    decay = decay[..., None] if decay.ndim == 3 else decay

    def one(state, token):
        q, k, v, decay, rate, begins = token
        state = jnp.where(begins[:, None, None, None], 0.0, state)
        state = decay[..., None] * state
        known = jnp.einsum("bhkv,bhk->bhv", state, k)
        state = state + jnp.einsum("bhk,bhv->bhkv", k, rate[:, :, None] * (v - known))
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    tokens = [jnp.moveaxis(a, 1, 0) for a in (q, k, v, decay, rate, begins)]
    return jnp.moveaxis(jax.lax.scan(one, state, tokens)[1], 0, 1)


def begins_of(segments: jax.Array) -> jax.Array:
    """Return the first tokens of documents, bool [B, T]."""
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return segments != before


def convolve(x: jax.Array, kernel: jax.Array, begins: jax.Array) -> jax.Array:
    """Convolve each channel with its kernel, over the latest tokens of the document.

    Args:     x: [B, T, ...]. kernel: [..., W]. begins: bool [B, T].
    """

    def one(latest, token):
        x, begins = token
        latest = jnp.where(begins.reshape(-1, *[1] * (latest.ndim - 1)), 0.0, latest)
        latest = jnp.concatenate((latest[..., 1:], x[..., None]), axis=-1)
        return latest, jnp.sum(latest * kernel, axis=-1)

    nothing = jnp.zeros((x.shape[0], *kernel.shape), x.dtype)
    tokens = jnp.moveaxis(x, 1, 0), begins.T
    return jnp.moveaxis(jax.lax.scan(one, nothing, tokens)[1], 0, 1)
