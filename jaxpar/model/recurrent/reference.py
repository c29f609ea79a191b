"""Recurrent layers in plain jax.numpy, token by token: one device, no chunks, no communication.

`jaxpar/model/reference.py` and the tests use it. It shares only parameter names with the layers.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import ModelConfig

type Tree = dict[str, Any]

#: The stack of each kind of layer.
STACKS = {
    "*": "layers",
    "A": "global_layers",
    "G": "delta_layers",
    "M": "mamba_layers",
    "K": "kda_layers",
    "k": "kda_dense_layers",
    "-": "mlp_layers",
    "E": "moe_layers",
}


def weights_of(params: Tree, i: int, m: ModelConfig) -> Tree:
    """Return the parameters of layer i, from the stack of its kind."""
    if m.layer_pattern:
        letters = [m.layer_pattern[j % len(m.layer_pattern)] for j in range(i + 1)]
        stack = STACKS[letters[i]]
        return jax.tree.map(lambda a: a[letters[:i].count(letters[i])], params[stack])
    if m.moe_every > 1:
        before, is_moe = (i + 1) // m.moe_every, (i + 1) % m.moe_every == 0
        stack, i = ("layers", before - 1) if is_moe else ("dense_layers", i - before)
        return jax.tree.map(lambda a: a[i], params[stack])
    dense = len(params["dense_layers"]["wo"]) if "dense_layers" in params else 0
    kind, i = ("dense_layers", i) if i < dense else ("layers", i - dense)
    return jax.tree.map(lambda a: a[i], params[kind])


def stacks_of_biases(params: Tree, m: ModelConfig) -> list[str]:
    """Return the stack of each layer with a router's bias, in order; modules come last."""
    has_bias = {stack for stack in params if "router_bias" in params[stack]}
    if not m.layer_pattern:
        stacks = (stack for stack in ("layers", "mtp") if stack in has_bias)
        return [stack for stack in stacks for _ in params[stack]["router_bias"]]
    letters = m.layer_pattern * (m.num_layers // len(m.layer_pattern))
    return [STACKS[kind] for kind in letters if STACKS[kind] in has_bias]


def times(h: jax.Array, w: Tree, name: str) -> jax.Array:
    """Compute h times a matrix, plus h times its adapter's two if it has one."""
    y = jnp.tensordot(h, w[name], 1)
    if name + "_lora_a" not in w:
        return y
    return y + jnp.tensordot(h @ w[name + "_lora_a"], w[name + "_lora_b"], 1)


def delta_net(h: jax.Array, w: Tree, segments: jax.Array, m: ModelConfig) -> jax.Array:
    """Compute Gated DeltaNet without its projection to the residual stream.

    Args:     h: [B, T, D]. w: the parameters of one layer. segments: int32 [B, T].
    Returns:  [B, T, H, V].
    Source:   Yang et al. 2024 (2412.06464).
    """
    begins = begins_of(segments)
    q, k, v = (
        jax.nn.silu(convolve(times(h, w, f"delta_{n}"), w[f"delta_conv_{n}"], begins))
        for n in "qkv"
    )
    v = v.reshape(*v.shape[:2], m.linear_num_value_heads, -1)
    unit = lambda x: x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)  # noqa: E731
    repeat = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(unit(a), repeat, axis=2) for a in (q, k))
    by_head = lambda n: times(h, w, f"delta_{n}").reshape(*v.shape[:3], -1)  # noqa: E731
    rate = (1 + m.linear_allow_neg_eigval) * jax.nn.sigmoid(by_head("b")[..., 0])
    step = jax.nn.softplus(by_head("a")[..., 0] + w["delta_dt_bias"])
    decay = jnp.exp(-jnp.exp(w["delta_a_log"]) * step)
    out = delta_rule(q / q.shape[-1] ** 0.5, k, v, decay, rate, begins)
    eps = m.norm_eps if m.linear_norm_eps is None else m.linear_norm_eps
    unit_rms = out / jnp.sqrt(jnp.mean(out**2, axis=-1, keepdims=True) + eps)
    return unit_rms * w["delta_norm"] * jax.nn.silu(by_head("z"))


def kimi_delta(h: jax.Array, w: Tree, segments: jax.Array, m: ModelConfig) -> jax.Array:
    """Compute Kimi Delta Attention without its projection to the residual stream.

    Args, Returns: as `delta_net`.
    Source:   Kimi Team 2025 (2510.26692).
    """
    begins = begins_of(segments)
    q, k, v = (
        jax.nn.silu(convolve(times(h, w, f"kda_{n}"), w[f"kda_conv_{n}"], begins)) for n in "qkv"
    )
    unit = lambda x: x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)  # noqa: E731
    step, gate = (jnp.tensordot(times(h, w, f"kda_{n}_a"), w[f"kda_{n}_b"], 1) for n in "fg")
    step = jax.nn.softplus(step + w["kda_dt_bias"])
    decay = jnp.exp(-jnp.exp(w["kda_a_log"])[:, None] * step)
    rate = jax.nn.sigmoid(times(h, w, "kda_b"))
    out = delta_rule(unit(q) / q.shape[-1] ** 0.5, unit(k), v, decay, rate, begins)
    eps = m.norm_eps if m.linear_norm_eps is None else m.linear_norm_eps
    unit_rms = out / jnp.sqrt(jnp.mean(out**2, axis=-1, keepdims=True) + eps)
    return unit_rms * w["kda_norm"] * jax.nn.sigmoid(gate)


def mamba(h: jax.Array, w: Tree, segments: jax.Array, m: ModelConfig) -> jax.Array:
    """Compute Mamba-2 without its projection to the residual stream.

    Args, Returns: as `delta_net`.
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
    step = jnp.maximum(step, m.mamba_min_step)
    repeat = x.shape[2] // key.shape[2]
    key, query = (jnp.repeat(a, repeat, axis=2) for a in (key, query))
    decay = jnp.exp(-jnp.exp(w["mamba_a_log"]) * step)
    out = state_space(query, key, step[..., None] * x, decay, begins)
    out = out + w["mamba_d"][:, None] * x
    out = out * jax.nn.silu(times(h, w, "mamba_z"))
    groups = out.reshape(*out.shape[:2], m.mamba_num_groups, -1)
    unit_rms = groups / jnp.sqrt(jnp.mean(groups**2, axis=-1, keepdims=True) + m.norm_eps)
    return unit_rms.reshape(out.shape) * w["mamba_norm"]


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
