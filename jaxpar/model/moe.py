"""Mixture of experts: a feed-forward layer of several SwiGLUs, with a few active per token.

Every expert processes every token, and a token's weight is 0 for the experts to which it is not
routed. The result is exact and no tokens are dropped, at a cost of num_experts / experts_per_token
times the necessary matmul FLOPs. Experts are sharded like other matrices: over FSDP_AXES on D, over
TENSOR on F.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ModelConfig
from jaxpar.execution.decisions import Execution
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.feed_forward import gated
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.tensor.shards import Shards

#: Names in the fused weight layout.
WEIGHTS = ("router", "w_gate", "w_up", "w_down")


def mixture(h: Shards, w: dict[str, Any], _: AttentionContext, ex: Execution) -> Shards:
    """Apply the experts to each shard of the sequence. The result is a partial sum over TENSOR."""
    return h.map(_of_shard, w, ex.cfg.model)


@jax.named_scope("experts")
def _of_shard(h: NormOutput, w: dict[str, Any], m: ModelConfig) -> jax.Array:
    """Compute the weighted sum of each token's experts: this rank's partial sum, [B, T, D].

    Only one expert's hidden values are in memory at a time. The backward recomputes them.

    Args:     w: router [D, E]; w_gate and w_up [E, D, F], w_down [E, F, D], compute dtype.
    Source:   Shazeer et al. 2017 (1701.06538), equation 1.
    """
    h_BTD = h.operand
    weights_EBT = jnp.moveaxis(route(h_BTD, w["router"], m), -1, 0)

    def expert(total: jax.Array, xs: tuple) -> tuple[jax.Array, None]:
        gate, up, down, weight_BT = xs
        out = gated(h_BTD @ gate, h_BTD @ up, m) @ down
        return total + weight_BT[..., None] * out.astype(jnp.float32), None

    start = varying(jnp.zeros(h_BTD.shape, jnp.float32))
    xs = w["w_gate"], w["w_up"], w["w_down"], weights_EBT
    total, _ = lax.scan(jax.checkpoint(expert, prevent_cse=False), start, xs)
    return total.astype(h_BTD.dtype)


@jax.named_scope("router")
def route(h_BTD: jax.Array, router_DE: jax.Array, m: ModelConfig) -> jax.Array:
    """Compute the weight of each expert for each token, float32 [B, T, E]: 0 except for the top k.

    The result is the same on each rank of TENSOR, which has complete tokens and the full router.

    Source:   Jiang et al. 2024 (2401.04088), section 2.1; Qwen2-MoE for weights not normalized.
    """
    logits = jnp.dot(h_BTD, router_DE, preferred_element_type=jnp.float32)
    likely, which = lax.top_k(jax.nn.softmax(logits, axis=-1), m.experts_per_token)
    if m.normalize_experts:
        likely /= jnp.sum(likely, axis=-1, keepdims=True)
    return jnp.sum(jax.nn.one_hot(which, m.num_experts) * likely[..., None], axis=-2)
