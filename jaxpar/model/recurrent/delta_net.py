"""Gated DeltaNet, as a branch of a layer in place of attention.

    project     queries, keys, values, an output gate, and two numbers per head: one matmul
    convolve    queries, keys and values, each channel over the latest tokens, then SiLU
    recur       the gated delta rule, with keys and queries of length 1     `delta_rule.py`
    gate        RMSNorm of each head's output, times SiLU of the gate

Heads are split over TENSOR, and nothing before the output projection communicates over it. As with
grouped queries, H key heads serve equal numbers of value heads.

Source:   Yang et al. 2024 (2412.06464), section 3.4.
"""

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
from jaxpar.model.recurrent.delta_rule import delta_rule
from jaxpar.model.recurrent.heads import delta_heads
from jaxpar.model.recurrent.parameters import DELTA_PROJECTIONS
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]

#: Names in the fused weight layout.
WEIGHTS = (
    *("delta_in", "delta_conv", "delta_a_log", "delta_dt_bias", "delta_norm", "delta_out"),
    *DELTA_PROJECTIONS,  # only adapters of these
)


class DeltaNetProjections(NamedTuple):
    """The products of the input with this tensor rank's columns of `delta_in`."""

    mixed: jax.Array
    """[B, T, C]: queries, keys and values before the convolution."""
    gate: jax.Array
    """[B, T, H, V]."""
    rate: jax.Array
    step: jax.Array
    """[B, T, H]."""


def mix(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Compute this tensor rank's heads and their partial sum of the output projection.

    Communication: over SEQUENCE, that of `causal_convolution` and `delta_rule`.
    """
    m, positions = ex.cfg.model, context.positions
    assert positions is not None, "made with the context of a model that has such layers"
    projected = split(named(h.map(project, w).in_order(), "qkv"), m)
    q, k, v = heads(causal_convolution(projected.mixed, w["delta_conv"], positions), m)
    rates = gates(projected, w, m)
    out, _ = delta_rule(q, k, v, *rates, positions == 0, m.recurrent_chunk, m.recurrent_backend)
    out = named(gated(out, projected.gate, w, m), "attn_out")
    return h.split(out).map(row_parallel, w, "delta_out", "attn_out")


@jax.named_scope("in_projection")
def project(h: NormOutput, w: Weights) -> jax.Array:
    """Compute all projections of the input by one column-parallel matmul, [B, T, columns]."""
    (y,) = products(h.operand, [w["delta_in"]], "attn_norm")
    return lora.add_side_by_side(h.scaled(y), h.operand, w, DELTA_PROJECTIONS)


def split(y: jax.Array, m: ModelConfig) -> DeltaNetProjections:
    """Split the result of `project`."""
    sizes = column_sizes(m, lax.axis_size(TENSOR))
    mixed = sum(sizes[:3])
    ends = [mixed, mixed + sizes[3], mixed + sizes[3] + sizes[4]]
    mixed_y, gate, rate, step = jnp.split(y, ends, axis=-1)
    gate = gate.reshape(*gate.shape[:-1], -1, m.linear_value_head_dim)
    return DeltaNetProjections(mixed_y, gate, rate, step)


def column_sizes(m: ModelConfig, tensor: int) -> tuple[int, ...]:
    """Return a rank's columns of `delta_in`: queries, keys, values, gate, rate and step."""
    keys = m.linear_num_key_heads * m.linear_key_head_dim // tensor
    heads = m.linear_num_value_heads // tensor
    values = heads * m.linear_value_head_dim
    return keys, keys, values, values, heads, heads


def heads(mixed: jax.Array, m: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys [B, T, G, K] and values [B, T, H, V] from the convolution's output.

    Args:     mixed: float32 [B, T, C].
    Returns:  in the compute dtype.
    """
    return delta_heads(mixed, column_sizes(m, lax.axis_size(TENSOR))[0], m)


def gates(
    projected: DeltaNetProjections, w: Weights, m: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Compute the logarithm of the decay, and the rate, of each token and head: float32 [B, T, H].

    Source:   Gu & Dao 2023 (2312.00752), section 3.2, for the decay; Grazzi et al. 2024
              (2411.12537), for rates of up to 2.
    """
    rate, step = (a.astype(jnp.float32) for a in (projected.rate, projected.step))
    log_decay = -jnp.exp(w["delta_a_log"]) * jax.nn.softplus(step + w["delta_dt_bias"])
    rate = jax.nn.sigmoid(rate)
    return log_decay, 2 * rate if m.linear_allow_neg_eigval else rate


@jax.named_scope("gated_norm")
def gated(out: jax.Array, gate: jax.Array, w: Weights, m: ModelConfig) -> jax.Array:
    """Normalize each head and multiply by the gate: the heads side by side, in the gate's dtype.

    Args:     out: float32 [B, T, H, V]. gate: [B, T, H, V].
    Returns:  [B, T, H V].
    """
    normalized = rms_norm(out, w["delta_norm"], m.delta_norm_eps)
    gated = normalized * jax.nn.silu(gate.astype(jnp.float32))
    return gated.astype(gate.dtype).reshape(*gate.shape[:2], -1)
