"""Latent attention of new tokens with a cache of latents: the absorbed form.

A score is q_N^T (W_k c) = (W_k^T q_N)^T c, so queries are multiplied by W_k once, and attend to the
latents themselves, as if these were one key head that all query heads share. The same latents are
the values: W_v multiplies the output. The cache then has Rkv + R values per token and layer for all
heads together, on every tensor rank.

Source:   DeepSeek-AI 2024 (2405.04434), section 2.1.2.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import ModelConfig
from jaxpar.kernels.attention import AttentionMask, attention
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.latent_attention import heads

type Weights = dict[str, Any]
type Entries = tuple[jax.Array, jax.Array]


def latents_and_entries(
    h: NormOutput, w: Weights, rope: Any, m: ModelConfig
) -> tuple[heads.Latents, Entries]:
    """Return the latents of new tokens, and what the cache holds of them.

    Returns:  (latents; (latents [B, T, 1, Rkv], rotary keys after RoPE [B, T, 1, R])).
    """
    *query, kv, key = heads.latents(h, w, m)
    c = heads.Latents(NormOutput(query[0]) if query else h, kv, key)
    return c, (kv[:, :, None], heads.rotated_key(key[:, :, None], rope, m))


def among_new(
    c: heads.Latents, new: Entries, w: Weights, rope: Any, mask: AttentionMask, m: ModelConfig
) -> jax.Array:
    """Attend among new tokens, with the keys and values of every head: [B, T, H, I].

    Args:     c, new: from `latents_and_entries`.
    """
    q, k_nope, v, _ = heads.up_projections(c, w, m)
    q, k = heads.rotated(q, rope, m), heads.join_rope_key(k_nope, new[1])
    return attention(q, k, v, mask, backend=m.attention_backend)[0]


def to_cache(
    c: heads.Latents, held: Entries, w: Weights, rope: Any, mask: AttentionMask, m: ModelConfig
) -> jax.Array:
    """Attend to a cache in the absorbed form: [B, T, H, I].

    Args:     held: latents [B, S, 1, Rkv] and rotary keys [B, S, 1, R], with those of `c`.
    """
    q = heads.rotated(heads.query_of(c, w, m), rope, m)
    q_nope, q_rope = jnp.split(q, [m.qk_nope_head_dim], axis=-1)
    matrices = w["wkv_b"].reshape(m.kv_lora_rank, q.shape[2], -1)
    of_keys, of_values = jnp.split(matrices, [m.qk_nope_head_dim], axis=-1)
    q = jnp.concatenate((jnp.einsum("bthn,rhn->bthr", q_nope, of_keys), q_rope), axis=-1)
    q *= math.sqrt(q.shape[-1] / m.head_dim)  # attention divides by the root of the wider one
    keys = jnp.concatenate(held, axis=-1)
    out = attention(q, keys, held[0], mask, backend="reference")[0]
    return jnp.einsum("bthr,rhi->bthi", out, of_values)
