"""Multi-head latent attention (MLA), as a branch of a layer. H counts one tensor rank's heads.

    c_q   = norm(h W_qa)                     query latent; without `q_lora_rank`, h itself
    c, k  = h W_kva                          key-value latent and rotary key, of all heads
    q     = c_q W_qb                         [N | R] dims of each head, of which R are rotated
    k, v  = norm(c) W_kvb                    [N | I] dims of each head
    out   = softmax([q_N | rope(q_R)] [k_N | rope(k)]^T scale) v W_o

Every tensor rank makes the latents of its own tokens. They are gathered instead of h, since they
are narrower.

Source:   DeepSeek-AI 2024 (2405.04434), section 2.1 and appendix C.
"""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.latent_attention import LatentAttention
from jaxpar.config import Config
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.attention import AttentionMask, attention
from jaxpar.kernels.norm import NormOutput, rms_norm
from jaxpar.model import lora, probes
from jaxpar.model import rope as model_rope
from jaxpar.model.attention_context import AttentionContext, component
from jaxpar.model.held import KEYS_AND_VALUES, HeldSize, NewTokens, mask_of_slots, write
from jaxpar.model.layer import Computation
from jaxpar.model.linear import products, row_parallel
from jaxpar.parallel.context import context_attention
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]


@flax.struct.dataclass
class Latents:
    """What queries, keys and values are computed from."""

    query: NormOutput
    """[B, T, Rq], or [B, T, D] without a query latent."""
    kv: jax.Array
    """[B, T, Rkv], normalized."""
    rope_key: jax.Array
    """[B, T, R], the key that all heads share, before RoPE."""


def received(
    h: NormOutput, w: Weights, name: str, context: AttentionContext, ex: Execution
) -> Shards:
    """Make the latents of this rank's tokens, and gather them over TENSOR.

    Args:     name: remat name of the gathered norm's output, which queries need without a latent.
    Communication: gathers of (Rq + Rkv + R) values of a token, or of D + Rkv + R.
    """
    a = component(context, LatentAttention)
    parts = latents(h, w, a)
    if a.q_lora_rank is None:
        query = _gathered_norm(h, name, ex)
        kv = Shards.gather(jnp.concatenate(parts, -1), in_shards=ex.collective_matmul)
        pairs = zip(query.parts, kv.parts, strict=True)
        return Shards(tuple(_split(query, part, a) for query, part in pairs))
    together = Shards.gather(jnp.concatenate(parts, -1), in_shards=ex.collective_matmul)
    first_of_kv = a.q_lora_rank

    def split(part: jax.Array) -> Latents:
        query, kv = jnp.split(part, [first_of_kv], axis=-1)
        return _split(NormOutput(named(query, "latent_norms")), kv, a)

    return together.each(split)


def _split(query: NormOutput, kv: jax.Array, a: LatentAttention) -> Latents:
    kv, rope_key = jnp.split(named(kv, "latent_norms"), [a.kv_lora_rank], axis=-1)
    return Latents(query, kv, rope_key)


def _gathered_norm(h: NormOutput, name: str, ex: Execution) -> Shards:
    if ex.norm == "in_quantizer":  # unmaterialized, and not split; the quantizer names it
        return Shards((h,))
    shards = Shards.gather(h.operand, in_shards=ex.collective_matmul)
    return shards.each(lambda part: NormOutput(named(part, name)))


@jax.named_scope("latents")
def latents(h: NormOutput, w: Weights, a: LatentAttention) -> list[jax.Array]:
    """Compute the query latent if there is one, the key-value latent and the rotary key.

    Returns:  [B, T, Rq], [B, T, Rkv] and [B, T, R]. The latents are normalized.
    """
    names = ("wq_a", "wkv_a") if a.q_lora_rank else ("wkv_a",)
    found = products(h.operand, [w[name] for name in names], "attn_norm")
    found = [lora.add(y, h.operand, w, name) for y, name in zip(found, names, strict=True)]
    *query, kv = (named(y, "latents") for y in found)
    kv, rope_key = jnp.split(kv, [a.kv_lora_rank], axis=-1)
    with jax.named_scope("norm"):
        query = [rms_norm(c, w["q_a_norm"], a.norm_eps) for c in query]
        kv = rms_norm(kv, w["kv_a_norm"], a.norm_eps)
    return [*query, kv, rope_key]


def heads(c: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Compute this tensor rank's heads and their partial sum of the output projection.

    Communication: that of `context_attention` over SEQUENCE.
    """
    how, a = ex.cfg.compute, component(context, LatentAttention)
    parts = c.map(up_projections, w, a).in_order()
    q, k_nope, v, rope_key = (named(y, "qkv") for y in parts)
    q, k = positioned(q, k_nope, rope_key, context.rope, a)
    q = probes.observe("queries", q, w, context, ex.cfg, k=k)
    out = context_attention(
        *(q, k, v, context.mask),
        kind=ex.cfg.parallel.context,
        backend=how.attention_backend,
        deterministic=how.attention_deterministic,
    )
    side_by_side = out.reshape(*out.shape[:2], -1)
    return c.split(side_by_side).map(row_parallel, w, "wo", "attn_out")


@jax.named_scope("qkv")
def up_projections(c: Latents, w: Weights, a: LatentAttention) -> list[jax.Array]:
    """Compute queries, keys without position and values from the latents.

    Returns:  q [B, T, H, K], k [B, T, H, N], v [B, T, H, I], and the rotary key [B, T, 1, R].
    """
    q = query_of(c, w, a)
    (kv,) = products(c.kv, [w["wkv_b"]], "latent_norms")
    kv = _by_head(lora.add(kv, c.kv, w, "wkv_b"), a)
    k, v = jnp.split(kv, [a.qk_nope_head_dim], axis=-1)
    return [q, k, v, c.rope_key[:, :, None]]


def query_of(c: Latents, w: Weights, a: LatentAttention) -> jax.Array:
    """Compute queries [B, T, H, K], before RoPE."""
    matrix, name = ("wq_b", "latent_norms") if a.q_lora_rank else ("wq", "attn_norm")
    (q,) = products(c.query.operand, [w[matrix]], name)
    return _by_head(lora.add(q, c.query.operand, w, matrix), a)


def _by_head(y: jax.Array, a: LatentAttention) -> jax.Array:
    return y.reshape(*y.shape[:2], a.num_heads // lax.axis_size(TENSOR), -1)


def positioned(
    q: jax.Array, k_nope: jax.Array, rope_key: jax.Array, rope: Any, a: LatentAttention
) -> tuple[jax.Array, jax.Array]:
    """Rotate the last R dims of queries, and the rotary key, which then joins the key of each head.

    Args:     as `up_projections` returns them. rope: `Tables`, or None in layers without RoPE.
    Returns:  q and k, [B, T, H, K]. Queries are multiplied by `score_factor`.
    """
    k = join_rope_key(k_nope, rotated_key(rope_key, rope, a))
    return named(rotated(q, rope, a), "qk"), named(k, "qk")


def rotated_key(rope_key: jax.Array, rope: Any, a: LatentAttention) -> jax.Array:
    """Rotate the key that all heads share, [B, T, 1, R]."""
    return rope_key if a.rope is None else model_rope.rope(rope_key, rope, a.rope.layout)


def join_rope_key(k_nope: jax.Array, rope_key: jax.Array) -> jax.Array:
    """Append the rotary key [B, T, 1, R] to the key of each head [B, T, H, N]."""
    shared = jnp.broadcast_to(rope_key, (*k_nope.shape[:3], rope_key.shape[-1]))
    return jnp.concatenate((k_nope, shared), axis=-1)


def rotated(q: jax.Array, rope: Any, a: LatentAttention) -> jax.Array:
    """Rotate the last R dims of queries, and multiply all by `score_factor`."""
    if a.rope is not None:
        nope, last = jnp.split(q, [a.qk_nope_head_dim], axis=-1)
        q = jnp.concatenate((nope, model_rope.rope(last, rope, a.rope.layout)), axis=-1)
    factor = model_rope.score_factor(a.rope.scaling if a.rope else None)
    return q if factor == 1 else q * factor


# ------------------------ Latent attention of new tokens with a cache of latents: the absorbed form
#
# A score is q_N^T (W_k c) = (W_k^T q_N)^T c, so queries are multiplied by W_k once, and attend to
# the latents themselves, as if these were one key head that all query heads share. The same latents
# are the values: W_v multiplies the output. The cache then has Rkv + R values per token and layer
# for all heads together, on every tensor rank.
#
# Source:   DeepSeek-AI 2024 (2405.04434), section 2.1.2.


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
    *query, kv, key = latents(h, w, a)
    c = Latents(NormOutput(query[0]) if query else h, kv, key)
    entries = kv[:, :, None], rotated_key(key[:, :, None], rope, a)
    held = write(held[0], entries[0], new.first), write(held[1], entries[1], new.first)
    if new.lengths is not None:  # with the keys and values of every head
        q, k_nope, v, _ = up_projections(c, w, a)
        q, k = rotated(q, rope, a), join_rope_key(k_nope, entries[1])
        out = attention(q, k, v, context.mask, backend=cfg.compute.attention_backend)[0]
    else:
        out = _to_held(c, held, w, rope, mask_of_slots(context, held[0]), a)
    return row_parallel(out.reshape(*out.shape[:2], -1), w, "wo", "attn_out"), held


def _to_held(
    c: Latents, held: Any, w: Weights, rope: Any, mask: AttentionMask, a: LatentAttention
) -> jax.Array:
    """Attend to what is held in the absorbed form: [B, T, H, I]."""
    q = rotated(query_of(c, w, a), rope, a)
    q_nope, q_rope = jnp.split(q, [a.qk_nope_head_dim], axis=-1)
    matrices = w["wkv_b"].reshape(a.kv_lora_rank, q.shape[2], -1)
    of_keys, of_values = jnp.split(matrices, [a.qk_nope_head_dim], axis=-1)
    q = jnp.concatenate((jnp.einsum("bthn,rhn->bthr", q_nope, of_keys), q_rope), axis=-1)
    q *= math.sqrt(q.shape[-1] / a.head_dim)  # attention divides by the root of the wider one
    keys = jnp.concatenate(held, axis=-1)
    out = attention(q, keys, held[0], mask, backend="reference")[0]
    return jnp.einsum("bthr,rhi->bthi", out, of_values)


LATENT_ATTENTION = Computation("attention", heads, decode, held, KEYS_AND_VALUES, receive=received)
