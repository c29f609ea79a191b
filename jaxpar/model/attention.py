"""Grouped-query attention, as a branch of a layer. H and G count one tensor rank's heads."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.attention import Attention
from jaxpar.config import Config, Model
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.attention import AttentionMask, attention
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import linear, lora, norm, probes
from jaxpar.model import rope as model_rope
from jaxpar.model.attention_context import AttentionContext, component
from jaxpar.model.held import KEYS_AND_VALUES, HeldSize, NewTokens, mask_of_slots, write
from jaxpar.model.layer import Computation
from jaxpar.model.linear import products, row_parallel
from jaxpar.model.mup import mup_score_factor
from jaxpar.model.own_heads import own_heads
from jaxpar.parallel.context import context_attention
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]


def heads(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Compute this tensor rank's heads and their partial sum of the output projection.

    Communication: that of `context_attention` over SEQUENCE, and of `positioned`.
    """
    m, a = ex.cfg.model, component(context, Attention)
    q, k, v = (named(y, "qkv") for y in h.map(qkv, w, a, m).in_order())
    q, k, v = attending(q, k, v, w, context, a, m)
    q = probes.observe("queries", q, w, context, ex.cfg, k=k)
    out = context_attention(
        *(q, k, v, context.mask),
        kind=ex.cfg.parallel.context,
        backend=ex.cfg.compute.attention_backend,
        deterministic=ex.cfg.compute.attention_deterministic,
        sinks=w.get("sinks"),
        softcap=a.softcap,
        function=own_heads(a),
    )
    side_by_side = gated(out.reshape(*out.shape[:2], -1), h, w)
    return h.split(side_by_side).map(row_parallel, w, "wo", "attn_out")


@jax.named_scope("output_gate")
def gated(out: jax.Array, h: Shards, w: Weights) -> jax.Array:
    """Multiply the heads' output [B, T, H K] by the sigmoid of a projection of the layer's input.

    Without `Attention.gate`, return it.

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
def qkv(h: NormOutput, w: Weights, a: Attention, m: Model) -> list[jax.Array]:
    """Compute queries [B, T, H, K], keys and values [B, T, G, K] by one column-parallel matmul.

    Without a projection of values, they are the keys (`Attention.keys_as_values`).
    """
    tensor = lax.axis_size(TENSOR)
    H, G, K = a.num_heads // tensor, a.num_kv_heads // tensor, a.head_dim
    of = ("wq", "wk") if a.keys_as_values else ("wq", "wk", "wv")
    (y,) = products(h.operand, [w["wqk" if a.keys_as_values else "wqkv"]], "attn_norm")
    y = h.scaled(_one_gradient(linear.add_bias(y, w.get("bqkv"))))
    parts = zip(jnp.split(y, [H * K, (H + G) * K][: len(of) - 1], axis=-1), of, strict=True)
    by_head = lambda y: y.reshape(*y.shape[:2], -1, K)  # noqa: E731
    q, k, *v = (by_head(lora.add(part, h.operand, w, name)) for part, name in parts)
    values = v[0] if v else k
    return [q, k, norm.rms_normalize(values, m) if a.value_norm else values]


@jax.custom_vjp
def _one_gradient(x: jax.Array) -> jax.Array:
    """Return x, and materialize its gradient once.

    Two matmuls read the gradient. XLA would concatenate it for each, or write RoPE's part first.
    """
    return x


_one_gradient.defvjp(lambda x: (x, None), lambda _, g: (lax.optimization_barrier(g),))


def attending(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: Weights,
    context: AttentionContext,
    a: Attention,
    m: Model,
) -> list[jax.Array]:
    """Compute queries, keys and values as they attend: `positioned`, then `Attention.attending`."""
    q, k = positioned(q, k, w, context, a, m)
    new = a.attending(q, k, v, w)
    return [one.astype(before.dtype) for one, before in zip(new, (q, k, v), strict=True)]


def positioned(
    q: jax.Array, k: jax.Array, w: Weights, context: AttentionContext, a: Attention, m: Model
) -> tuple[jax.Array, jax.Array]:
    """Apply norms, then RoPE unless it is None, to queries and keys, [B, T, heads, K].

    Communication: that of `norm_over_heads` if `qk_norm.over` is all.
    """
    if a.qk_norm and not a.qk_norm.gain:
        # Before RoPE, which does not change the norm. Llama 4 normalizes after it.
        q, k = (q, k) if a.rope is None else (norm.rms_normalize(q, m), norm.rms_normalize(k, m))
    elif a.qk_norm:
        normalize = norm.norm if a.qk_norm.over == "head" else norm.norm_over_heads
        q, k = normalize(q, w["q_norm"], m), normalize(k, w["k_norm"], m)
    if a.scale is not None:
        q = q * (a.scale * math.sqrt(a.head_dim))
    if a.scale_dim is not None:
        q = q * math.sqrt(a.head_dim / a.scale_dim)
    if (factor := mup_score_factor(a, m)) != 1:
        q = q * factor
    if context.query_scale is not None:
        q = (q * context.query_scale).astype(q.dtype)
    rope, tables = a.rope, context.rope
    if rope is None or tables is None:
        return named(q, "qk"), named(k, "qk")
    q, k = (named(model_rope.rope(x, tables, rope.layout), "qk") for x in (q, k))
    return q, k


# --------------------------------------------------------------------------------- generation


def held(a: Attention, size: HeldSize) -> tuple[jax.Array, jax.Array]:
    """Return zeros for the keys and values of a text, [B, S, G/tensor, K] each."""
    shape = size.rows, size.slots, a.num_kv_heads // size.tensor, a.head_dim
    return jnp.zeros(shape, size.dtype), jnp.zeros(shape, size.dtype)


def decode(
    h: NormOutput, w: Weights, context: AttentionContext, held: Any, new: NewTokens, cfg: Config
) -> tuple[jax.Array, Any]:
    """Attend from new tokens to each other, or to all that is held, with them.

    Returns:  (this tensor rank's partial sum [B, T, D]; what is held with them).
    """
    m, a = cfg.model, component(context, Attention)
    q, k, v = qkv(h, w, a, m)
    q, k, v = attending(q, k, v, w, context, a, m)
    held = write(held[0], k, new.first), write(held[1], v, new.first)
    if new.lengths is not None:
        out = _attend(q, k, v, context.mask, w, a, cfg.compute.attention_backend)
    else:
        keys, values = held
        out = _attend(q, keys, values, mask_of_slots(context, keys), w, a, "reference")
    side_by_side = gated(out.reshape(*out.shape[:2], -1), Shards((h,)), w)
    return row_parallel(side_by_side, w, "wo", "attn_out"), held


def _attend(q, k, v, mask: AttentionMask, w: Weights, a: Attention, backend: Any) -> jax.Array:
    if function := own_heads(a):
        return function(q, k, v, mask)
    sinks = w.get("sinks")
    return attention(q, k, v, mask, sinks=sinks, softcap=a.softcap, backend=backend)[0]


ATTENTION = Computation("attention", heads, decode, held, KEYS_AND_VALUES)
