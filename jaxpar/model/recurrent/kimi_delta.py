"""Kimi Delta Attention (KDA), as a branch of a layer in place of attention.

    project     queries, keys and values: one matmul; two latents, and a rate per head: another
    convolve    queries, keys and values, each channel over the latest tokens, then SiLU
    decay       of each channel of a key, from the first latent
    recur       the delta rule, with keys and queries of length 1     `delta_rule.py`
    gate        RMSNorm of each head's output, times the sigmoid of a gate from the second latent

It is Gated DeltaNet with a decay for each channel of the key. Heads are split over TENSOR. Every
tensor rank computes the latents of all its tokens, which all heads read. Nothing before the output
projection communicates over TENSOR.

Source:   Kimi Team 2025 (2510.26692), Kimi Linear, sections 3 and 4.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ModelConfig
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import NormOutput, rms_norm
from jaxpar.model import lora
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.linear import products, row_parallel
from jaxpar.model.recurrent.convolution import causal_convolution
from jaxpar.model.recurrent.delta_rule import delta_rule_by_channel
from jaxpar.model.recurrent.heads import delta_heads
from jaxpar.model.recurrent.parameters import KDA_GATES, KDA_PROJECTIONS
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]

#: Names in the fused weight layout.
WEIGHTS = (
    *("kda_in", "kda_gates", "kda_conv", "kda_f_b", "kda_g_b", "kda_a_log", "kda_dt_bias"),
    *("kda_norm", "kda_out"),
    *KDA_PROJECTIONS,  # only adapters of these
    *KDA_GATES,
)


class KimiDeltaProjections(NamedTuple):
    """The products of the input with this tensor rank's columns of `kda_in` and `kda_gates`."""

    mixed: jax.Array
    """[B, T, C]: queries, keys and values before the convolution."""
    decay: jax.Array
    gate: jax.Array
    """[B, T, V]: latents of all heads."""
    rate: jax.Array
    """[B, T, H]."""


def mix(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Compute this tensor rank's heads and their partial sum of the output projection.

    Communication: over SEQUENCE, that of `causal_convolution` and `delta_rule_by_channel`.
    """
    m, positions = ex.cfg.model, context.positions
    assert positions is not None, "made with the context of a model that has such layers"
    projected = split([named(y, "qkv") for y in h.map(project, w).in_order()], m)
    q, k, v = heads(causal_convolution(projected.mixed, w["kda_conv"], positions), m)
    begins, rates = positions == 0, (log_decay(projected, w, m), rate(projected))
    out, _ = delta_rule_by_channel(q, k, v, *rates, begins, m.recurrent_chunk)
    out = named(gated(out, projected.gate, w, m), "attn_out")
    return h.split(out).map(row_parallel, w, "kda_out", "attn_out")


@jax.named_scope("in_projection")
def project(h: NormOutput, w: Weights) -> list[jax.Array]:
    """Compute the products with `kda_in` and `kda_gates`, [B, T, columns] each.

    The second is in the compute dtype also in float8: decays of many tokens are multiplied, and
    gradients of latents are sums over tensor ranks, which would each be rounded.
    """
    (mixed,) = products(h.operand, [w["kda_in"]], "attn_norm")
    mixed = lora.add_side_by_side(h.scaled(mixed), h.operand, w, KDA_PROJECTIONS)
    x = h.array()
    (gates,) = products(x, [w["kda_gates"]], "attn_norm")
    return [mixed, lora.add_side_by_side(h.scaled(gates), x, w, KDA_GATES)]


def split(projected: Sequence[jax.Array], m: ModelConfig) -> KimiDeltaProjections:
    """Split the results of `project`."""
    mixed, gates = projected
    latent = m.linear_value_head_dim
    return KimiDeltaProjections(mixed, *jnp.split(gates, [latent, 2 * latent], axis=-1))


def column_sizes(m: ModelConfig, tensor: int) -> tuple[int, ...]:
    """Return a rank's columns: queries, keys and values; two latents and rate."""
    heads, latent = m.linear_num_key_heads // tensor, m.linear_value_head_dim
    keys, values = heads * m.linear_key_head_dim, heads * m.linear_value_head_dim
    return keys, keys, values, latent, latent, heads


def heads(mixed: jax.Array, m: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys [B, T, H, K] and values [B, T, H, V] from the convolution's output.

    Args:     mixed: float32 [B, T, C].
    Returns:  in the compute dtype.
    """
    return delta_heads(mixed, column_sizes(m, lax.axis_size(TENSOR))[0], m)


@jax.named_scope("decay")
def log_decay(projected: KimiDeltaProjections, w: Weights, m: ModelConfig) -> jax.Array:
    """Compute the logarithm of the decay of each token, head and channel: float32 [B, T, H, K]."""
    (step,) = products(projected.decay, [w["kda_f_b"]], "qkv")
    step = step.astype(jnp.float32).reshape(*step.shape[:-1], -1, m.linear_key_head_dim)
    return -jnp.exp(w["kda_a_log"])[:, None] * jax.nn.softplus(step + w["kda_dt_bias"])


def rate(projected: KimiDeltaProjections) -> jax.Array:
    """Compute the rate of the write of each token and head: float32 [B, T, H]."""
    return jax.nn.sigmoid(projected.rate.astype(jnp.float32))


@jax.named_scope("gated_norm")
def gated(out: jax.Array, latent: jax.Array, w: Weights, m: ModelConfig) -> jax.Array:
    """Normalize each head and multiply by the sigmoid of its gate, in the latent's dtype.

    Args:     out: float32 [B, T, H, V]. latent: [B, T, V].
    Returns:  [B, T, H V], the heads side by side.
    """
    (gate,) = products(latent, [w["kda_g_b"]], "qkv")
    normalized = rms_norm(out, w["kda_norm"], m.delta_norm_eps)
    gated = normalized * jax.nn.sigmoid(gate.astype(jnp.float32).reshape(out.shape))
    return gated.astype(latent.dtype).reshape(*gate.shape)
