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

from jaxpar.components.latent_attention import LatentAttention
from jaxpar.config import Config
from jaxpar.kernels.attention import AttentionMask, attention
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.attention_context import AttentionContext, component
from jaxpar.model.held import HeldSize, NewTokens, mask_of_slots, write
from jaxpar.model.latent_attention import heads
from jaxpar.model.linear import row_parallel

type Weights = dict[str, Any]


def held(a: LatentAttention, size: HeldSize) -> tuple[jax.Array, jax.Array]:
    """Return zeros for latents [B, S, 1, Rkv] and rotary keys [B, S, 1, R], complete on each tensor
    rank."""
    of = lambda dim: jnp.zeros((size.rows, size.slots, 1, dim), size.dtype)  # noqa: E731
    return of(a.kv_lora_rank), of(a.qk_rope_head_dim)


def decode(
    h: NormOutput, w: Weights, context: AttentionContext, held: Any, new: NewTokens, cfg: Config
) -> tuple[jax.Array, Any]:
    """Attend from new tokens to each other, or to all that is held, with them.

    Returns:  (this tensor rank's partial sum [B, T, D]; what is held with them).
    """
    a, rope = component(context, LatentAttention), context.rope
    *query, kv, key = heads.latents(h, w, a)
    c = heads.Latents(NormOutput(query[0]) if query else h, kv, key)
    entries = kv[:, :, None], heads.rotated_key(key[:, :, None], rope, a)
    held = write(held[0], entries[0], new.first), write(held[1], entries[1], new.first)
    if new.lengths is not None:  # with the keys and values of every head
        q, k_nope, v, _ = heads.up_projections(c, w, a)
        q, k = heads.rotated(q, rope, a), heads.join_rope_key(k_nope, entries[1])
        out = attention(q, k, v, context.mask, backend=cfg.compute.attention_backend)[0]
    else:
        out = _to_held(c, held, w, rope, mask_of_slots(context, held[0]), a)
    return row_parallel(out.reshape(*out.shape[:2], -1), w, "wo", "attn_out"), held


def _to_held(
    c: heads.Latents, held: Any, w: Weights, rope: Any, mask: AttentionMask, a: LatentAttention
) -> jax.Array:
    """Attend to what is held in the absorbed form: [B, T, H, I]."""
    q = heads.rotated(heads.query_of(c, w, a), rope, a)
    q_nope, q_rope = jnp.split(q, [a.qk_nope_head_dim], axis=-1)
    matrices = w["wkv_b"].reshape(a.kv_lora_rank, q.shape[2], -1)
    of_keys, of_values = jnp.split(matrices, [a.qk_nope_head_dim], axis=-1)
    q = jnp.concatenate((jnp.einsum("bthn,rhn->bthr", q_nope, of_keys), q_rope), axis=-1)
    q *= math.sqrt(q.shape[-1] / a.head_dim)  # attention divides by the root of the wider one
    keys = jnp.concatenate(held, axis=-1)
    out = attention(q, keys, held[0], mask, backend="reference")[0]
    return jnp.einsum("bthr,rhi->bthi", out, of_values)
