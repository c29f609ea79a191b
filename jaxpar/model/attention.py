"""Grouped-query attention, as a layer's branch. H and G are one tensor rank's part of the heads."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ModelConfig, registry
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import linear, lora, norm
from jaxpar.model import rope as model_rope
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.linear import products, row_parallel
from jaxpar.parallel.context import context_attention
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]

#: In a layer's view; wq, wk and wv are there for their adapters.
WEIGHTS = ("wq", "wk", "wv", "wqkv", "bqkv", "q_norm", "k_norm", "wo")


def heads(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """This tensor rank's heads, and its part of the sum that they are projected to.

    Communication: what `context_attention` sends over SEQUENCE.
    """
    m = ex.cfg.model
    q, k, v = (named(a, "qkv") for a in h.map(qkv, w, m).in_order())
    q, k = positioned(q, k, w, context.rope, m)
    out = context_attention(
        *(q, k, v, context.mask),
        kind=ex.cfg.parallel.context,
        backend=m.attention_backend,
        deterministic=m.attention_deterministic,
        function=registry.function("model.attention", m.attention),
    )
    side_by_side = out.reshape(*out.shape[:2], -1)
    return h.split(side_by_side).map(row_parallel, w, "wo", "attn_out")


@jax.named_scope("qkv")
def qkv(h: NormOutput, w: Weights, m: ModelConfig) -> list[jax.Array]:
    """Queries [B, T, H, K], keys and values [B, T, G, K]: one column-parallel matmul."""
    tensor = lax.axis_size(TENSOR)
    H, G, K = m.num_heads // tensor, m.num_kv_heads // tensor, m.head_dim
    (y,) = products(h.operand, [w["wqkv"]], "attn_norm")
    y = h.scaled(_one_gradient(linear.add_bias(y, w.get("bqkv"))))
    parts = zip(jnp.split(y, [H * K, (H + G) * K], axis=-1), ("wq", "wk", "wv"), strict=True)
    by_head = lambda y: y.reshape(*y.shape[:2], -1, K)  # noqa: E731
    return [by_head(lora.add(part, h.operand, w, name)) for part, name in parts]


@jax.custom_vjp
def _one_gradient(x: jax.Array) -> jax.Array:
    """x, whose gradient is put together once: two matmuls read it, and XLA would put it together
    for each, or first write RoPE's part of it for both."""
    return x


_one_gradient.defvjp(lambda x: (x, None), lambda _, g: (lax.optimization_barrier(g),))


def positioned(
    q: jax.Array, k: jax.Array, w: Weights, rope: tuple[jax.Array, jax.Array], m: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys as attention is given them, [B, T, heads, K]: head norms, then RoPE."""
    if m.qk_norm:
        q, k = norm.norm(q, w["q_norm"], m), norm.norm(k, w["k_norm"], m)
    if m.query_scale_dim is not None:
        q = q * math.sqrt(m.head_dim / m.query_scale_dim)
    q, k = (named(model_rope.rope(a, rope), "qk") for a in (q, k))
    return q, k
