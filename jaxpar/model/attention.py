"""Grouped-query attention, as a branch of a layer. H and G count one tensor rank's heads."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ModelConfig, registry
from jaxpar.config.layout.layer_kinds import of_kind
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import linear, lora, norm, probes
from jaxpar.model import rope as model_rope
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.linear import products, row_parallel
from jaxpar.parallel.context import context_attention
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]

#: Names in the fused weight layout. wq, wk and wv are listed for their adapters.
WEIGHTS = (
    *("wq", "wk", "wv", "wqkv", "wqk", "bqkv", "q_norm", "k_norm", "sinks"),
    *("w_attn_gate", "wo"),
)


def heads(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Compute this tensor rank's heads and their partial sum of the output projection.

    Communication: that of `context_attention` over SEQUENCE, and of `positioned`.
    """
    m = of_kind(ex.cfg.model, context.kind)
    q, k, v = (named(a, "qkv") for a in h.map(qkv, w, m).in_order())
    q, k = positioned(q, k, w, context, m)
    q = probes.observe("queries", q, w, context, ex.cfg, k=k)
    out = context_attention(
        *(q, k, v, context.mask),
        kind=ex.cfg.parallel.context,
        backend=m.attention_backend,
        deterministic=m.attention_deterministic,
        sinks=w.get("sinks"),
        softcap=m.attention_softcap,
        function=registry.function("model.attention", m.attention),
    )
    side_by_side = gated(out.reshape(*out.shape[:2], -1), h, w)
    return h.split(side_by_side).map(row_parallel, w, "wo", "attn_out")


@jax.named_scope("output_gate")
def gated(out: jax.Array, h: Shards, w: Weights) -> jax.Array:
    """Multiply the heads' output [B, T, H K] by the sigmoid of a projection of the layer's input.

    Without `model.attention_gate`, return it.

    Source:   Qiu et al. 2025 (2505.06708), gated attention, equation 5.
    """
    if "w_attn_gate" not in w:
        return out
    gate = h.map(_gate, w).in_order().astype(jnp.float32)
    return (out * jax.nn.sigmoid(gate)).astype(out.dtype)


def _gate(h: NormOutput, w: Weights) -> jax.Array:
    (y,) = products(h.operand, [w["w_attn_gate"]], "attn_norm")
    return h.scaled(y)


@jax.named_scope("qkv")
def qkv(h: NormOutput, w: Weights, m: ModelConfig) -> list[jax.Array]:
    """Compute queries [B, T, H, K], keys and values [B, T, G, K] by one column-parallel matmul.

    Without a projection of values, they are the keys (`model.global_keys_as_values`).
    """
    tensor = lax.axis_size(TENSOR)
    H, G, K = m.num_heads // tensor, m.num_kv_heads // tensor, m.head_dim
    name, of = ("wqkv", ("wq", "wk", "wv")) if "wqkv" in w else ("wqk", ("wq", "wk"))
    (y,) = products(h.operand, [w[name]], "attn_norm")
    y = h.scaled(_one_gradient(linear.add_bias(y, w.get("bqkv"))))
    parts = zip(jnp.split(y, [H * K, (H + G) * K][: len(of) - 1], axis=-1), of, strict=True)
    by_head = lambda y: y.reshape(*y.shape[:2], -1, K)  # noqa: E731
    q, k, *v = (by_head(lora.add(part, h.operand, w, name)) for part, name in parts)
    values = v[0] if v else k
    return [q, k, norm.unit(values, m) if m.value_norm else values]


@jax.custom_vjp
def _one_gradient(x: jax.Array) -> jax.Array:
    """Return x, and materialize its gradient once.

    Two matmuls read the gradient. XLA would concatenate it for each, or write RoPE's part first.
    """
    return x


_one_gradient.defvjp(lambda x: (x, None), lambda _, g: (lax.optimization_barrier(g),))


def positioned(
    q: jax.Array, k: jax.Array, w: Weights, context: AttentionContext, m: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Apply norms, then RoPE unless it is None, to queries and keys, [B, T, heads, K].

    Communication: that of `norm_over_heads` if `model.qk_norm_over` is all.
    """
    if m.qk_norm and not m.qk_norm_gain:
        # Before RoPE, which does not change the norm. Llama 4 normalizes after it.
        q, k = (q, k) if context.rope is None else (norm.unit(q, m), norm.unit(k, m))
    elif m.qk_norm:
        normalize = norm.norm if m.qk_norm_over == "head" else norm.norm_over_heads
        q, k = normalize(q, w["q_norm"], m), normalize(k, w["k_norm"], m)
    if m.attention_multiplier is not None:
        q = q * (m.attention_multiplier * math.sqrt(m.head_dim))
    if m.query_scale_dim is not None:
        q = q * math.sqrt(m.head_dim / m.query_scale_dim)
    if m.mup_score_factor != 1:
        q = q * m.mup_score_factor
    if context.query_scale is not None:
        q = (q * context.query_scale).astype(q.dtype)
    rope = context.rope
    rotate = lambda a: a if rope is None else model_rope.rope(a, rope, m.rope_layout)  # noqa: E731
    q, k = (named(rotate(a), "qk") for a in (q, k))
    return q, k
