"""A reference model in plain jax.numpy: one device, no sharding, no rematerialization, no kernels.

`python -m jaxpar.verify` and the tests compare every mesh with it. It deliberately shares only the
parameter names with `transformer.py`, so that a mistake in one of them shows as a difference.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config, ModelConfig, registry
from jaxpar.kernels.attention import AttentionMask
from jaxpar.sharding.batch import IGNORED, Batch

type Tree = dict[str, Any]


def loss(params: Tree, batch: Batch, cfg: Config) -> jax.Array:
    """Compute the mean cross entropy (with z-loss) over the labeled tokens of a batch, float32.

    Args:     params: the logical parameters. batch: [B, T] in text order.
    """
    params = scale_adapters(params, cfg)
    logits = logits_of(params, batch.tokens, batch.positions, _segments(batch, cfg), cfg.model)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    label = jnp.maximum(batch.labels, 0)
    nll = lse - jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
    weight = batch.labels != IGNORED
    return jnp.sum(jnp.where(weight, nll + cfg.train.z_loss * lse**2, 0)) / jnp.sum(weight)


def scale_adapters(params: Tree, cfg: Config) -> Tree:
    """Scale the second matrix of each adapter by `lora.alpha`, as `block` expects."""
    r = max(cfg.lora.rank, 1)
    scale = cfg.lora.alpha / (r**0.5 if cfg.lora.rank_stabilized else r)
    scaled = {n: w * scale if n.endswith("_lora_b") else w for n, w in params["layers"].items()}
    return params | {"layers": scaled}


def _segments(batch: Batch, cfg: Config) -> jax.Array:
    ids = jnp.asarray(batch.segment_ids)
    return ids if cfg.data.document_mask else jnp.ones_like(ids)


def logits_of(params: Tree, tokens, positions, segments, m: ModelConfig) -> jax.Array:
    """Compute logits, float32 [B, T, V], from int32 [B, T] tokens, positions and segments."""
    x = embed(params["embed"][tokens], m)
    for i in range(m.num_layers):
        w = jax.tree.map(lambda a, i=i: a[i], params["layers"])
        x = block(x, w, positions, segments, of_layer(m, i))
    return output(x, params, m)


def output(x: jax.Array, top: Tree, m: ModelConfig) -> jax.Array:
    """Compute logits from the last residual stream. `top` has the parameters outside the layers."""
    head = top["head"] if "head" in top else top["embed"].T
    return _norm(x, top["final_norm"], m) @ head


def embed(rows: jax.Array, m: ModelConfig) -> jax.Array:
    """Compute the first residual stream from the tokens' rows of the embedding."""
    return rows * m.d_model**0.5 if m.embed_scale else rows


def of_layer(m: ModelConfig, i: int) -> ModelConfig:
    """Return the model config for only layer i, with the window and rotary base of its kind."""
    if m.global_every == 0:
        return m
    alike = dataclasses.replace(m, global_every=0, local_rope_theta=None)
    if i % m.global_every == m.global_every - 1:
        return dataclasses.replace(alike, sliding_window=None)
    return dataclasses.replace(alike, rope_theta=m.local_rope_theta or m.rope_theta)


def block(x: jax.Array, w: Tree, positions, segments, m: ModelConfig) -> jax.Array:
    """Apply one layer with the parameters `w` to the residual stream [B, T, D]."""
    h = _norm(x, w["attn_norm"], m)
    q, k, v = (_times(h, w, "w" + n) + w.get("b" + n, 0.0) for n in ("q", "k", "v"))
    if m.qk_norm:
        q, k = _norm(q, w["q_norm"], m), _norm(k, w["k_norm"], m)
    q, k = (_rotate(a, positions, m) for a in (q, k))
    o = _attend(q, k, v, positions, segments, m)
    o = _times(o, w, "wo") + w.get("bo", 0.0)
    x = x + (_norm(o, w["attn_post_norm"], m) if m.post_norms else o)
    out = _feed_forward(_norm(x, w["mlp_norm"], m), w, m)
    return x + (_norm(out, w["mlp_post_norm"], m) if m.post_norms else out)


def _times(x, w: Tree, name: str):
    """Compute x times a matrix, plus x times the product of its adapter's two if it has one."""
    y = jnp.tensordot(x, w[name], 2 if name == "wo" else 1)
    if name + "_lora_a" not in w:
        return y
    a, b = w[name + "_lora_a"], w[name + "_lora_b"]
    return y + jnp.tensordot(jnp.tensordot(x, a, a.ndim - 1), b, 1)


def _feed_forward(h, w: Tree, m: ModelConfig):
    if m.num_experts:
        return _experts(h, w, m)
    gate, up = (_times(h, w, "w_" + n) + w.get("b_" + n, 0.0) for n in ("gate", "up"))
    return _times(_activation(gate, m) * up, w, "w_down") + w.get("b_down", 0.0)


def _activation(x, m: ModelConfig):
    if m.activation == "silu":
        return x * jax.nn.sigmoid(x)
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _experts(h, w: Tree, m: ModelConfig):
    """Apply all experts to all tokens. Experts below the k-th most likely have weight 0."""
    chance = jax.nn.softmax(h @ w["router"], axis=-1)
    least = jnp.sort(chance, axis=-1)[..., -m.experts_per_token, None]
    chance = jnp.where(chance >= least, chance, 0.0)
    if m.normalize_experts:
        chance = chance / jnp.sum(chance, axis=-1, keepdims=True)
    gate, up = (jnp.einsum("btd,edf->btef", h, w["w_" + n]) for n in ("gate", "up"))
    hidden = _activation(gate, m) * up
    return jnp.einsum("btef,efd,bte->btd", hidden, w["w_down"], chance)


def _norm(x, gain, m: ModelConfig):
    unit = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + m.norm_eps)
    return unit * (1 + gain) if m.norm_offset else unit * gain


def _rotate(x, positions, m: ModelConfig):
    half = m.head_dim // 2
    inv = jnp.asarray([_frequency(m.rope_theta ** (-j / half), m) for j in range(half)])
    angle = positions[:, :, None, None] * inv
    a, b = x[..., :half], x[..., half:]
    turned = a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)
    return jnp.concatenate(turned, axis=-1)


def _frequency(inv: float, m: ModelConfig) -> float:
    """Apply Llama 3.1's scaling by wavelength, written as in its authors' code."""
    s = m.rope_scaling
    if s is None:
        return inv
    wavelength = 2 * math.pi / inv
    if wavelength < s.original_max_position / s.high_freq_factor:
        return inv
    if wavelength > s.original_max_position / s.low_freq_factor:
        return inv / s.factor
    smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    return (1 - smooth) * inv / s.factor + smooth * inv


def _attend(q, k, v, positions, segments, m: ModelConfig):
    if function := registry.function("model.attention", m.attention):
        mask = AttentionMask(positions, positions, segments, segments, m.sliding_window)
        return function(q * math.sqrt(m.head_dim / (m.query_scale_dim or m.head_dim)), k, v, mask)
    k, v = (jnp.repeat(a, m.num_heads // m.num_kv_heads, axis=2) for a in (k, v))
    back = positions[:, :, None] - positions[:, None, :]
    seen = (back >= 0) & (segments[:, :, None] == segments[:, None, :])
    if m.sliding_window is not None:
        seen &= back < m.sliding_window
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(m.query_scale_dim or m.head_dim)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, v)
