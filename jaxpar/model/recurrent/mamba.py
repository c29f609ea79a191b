"""Mamba-2, as a branch of a layer in place of attention.

    project     an output gate, values, keys, queries, and a time step per head: one matmul
    convolve    values, keys and queries, each channel over the latest tokens, then SiLU
    recur       values times the time step, into a state that decays          `state_space.py`
    gate        plus the value itself; times SiLU of the gate; RMSNorm of each group

Published code calls values x, keys B and queries C. Groups, with their heads, are split over
TENSOR, and nothing before the output projection communicates over it.

Source:   Dao & Gu 2024 (2405.21060), section 7.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ModelConfig
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import lora
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.linear import products, row_parallel
from jaxpar.model.recurrent.convolution import causal_convolution
from jaxpar.model.recurrent.parameters import MAMBA_PROJECTIONS
from jaxpar.model.recurrent.state_space import state_space
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]

#: Names in the fused weight layout.
WEIGHTS = (
    *("mamba_in", "mamba_conv", "mamba_conv_bias", "mamba_a_log", "mamba_dt_bias"),
    *("mamba_d", "mamba_norm", "mamba_out"),
    *MAMBA_PROJECTIONS,  # only adapters of these
)


class MambaProjections(NamedTuple):
    """The products of the input with this tensor rank's columns of `mamba_in`."""

    gate: jax.Array
    """[B, T, H P]."""
    mixed: jax.Array
    """[B, T, C]: values, keys and queries before the convolution."""
    step: jax.Array
    """[B, T, H]."""


class MambaInputs(NamedTuple):
    """What the recurrence reads."""

    queries: jax.Array
    keys: jax.Array
    """[B, T, G, N], in the compute dtype."""
    values: jax.Array
    """float32 [B, T, H, P], without the time step."""
    step: jax.Array
    log_decay: jax.Array
    """float32 [B, T, H]."""

    @property
    def written(self) -> jax.Array:
        """[B, T, H, P], in the compute dtype: the values times the time step."""
        return (self.step[..., None] * self.values).astype(self.keys.dtype)


def mix(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Compute this tensor rank's heads and their partial sum of the output projection.

    Communication: over SEQUENCE, that of `causal_convolution` and `state_space`.
    """
    m, positions = ex.cfg.model, context.positions
    assert positions is not None, "made with the context of a model that has such layers"
    projected = split(named(h.map(project, w).in_order(), "qkv"), m)
    x = inputs(projected, causal_convolution(projected.mixed, w["mamba_conv"], positions), w, m)
    recurrence = x.queries, x.keys, x.written, x.log_decay
    out, _ = state_space(*recurrence, positions == 0, m.recurrent_chunk, m.recurrent_backend)
    out = named(gated(out, x.values, projected.gate, w, m), "attn_out")
    return h.split(out).map(row_parallel, w, "mamba_out", "attn_out")


@jax.named_scope("in_projection")
def project(h: NormOutput, w: Weights) -> jax.Array:
    """Compute all projections of the input by one column-parallel matmul, [B, T, columns]."""
    (y,) = products(h.operand, [w["mamba_in"]], "attn_norm")
    return lora.add_side_by_side(h.scaled(y), h.operand, w, MAMBA_PROJECTIONS)


def split(y: jax.Array, m: ModelConfig) -> MambaProjections:
    """Split the result of `project`."""
    gate, *mixed, _ = column_sizes(m, lax.axis_size(TENSOR))
    return MambaProjections(*jnp.split(y, [gate, gate + sum(mixed)], axis=-1))


def column_sizes(m: ModelConfig, tensor: int) -> tuple[int, ...]:
    """Return a rank's columns of `mamba_in`: gate, values, keys, queries and step."""
    heads = m.mamba_num_heads // tensor
    values, keys = heads * m.mamba_head_dim, m.mamba_num_groups // tensor * m.mamba_state_size
    return values, values, keys, keys, heads


def inputs(
    projected: MambaProjections, mixed: jax.Array, w: Weights, m: ModelConfig
) -> MambaInputs:
    """Compute what the recurrence reads.

    Args:     mixed: float32 [B, T, C], the convolution's output, without its bias.
    """
    _, values, keys, _, _ = column_sizes(m, lax.axis_size(TENSOR))
    mixed = jax.nn.silu(mixed + w["mamba_conv_bias"])
    v, k, q = jnp.split(mixed, [values, values + keys], axis=-1)
    by = lambda a, dim: a.reshape(*a.shape[:2], -1, dim)  # noqa: E731
    q, k = (by(a, m.mamba_state_size).astype(m.dtype) for a in (q, k))
    step = jax.nn.softplus(projected.step.astype(jnp.float32) + w["mamba_dt_bias"])
    step = jnp.maximum(step, m.mamba_min_step)
    return MambaInputs(q, k, by(v, m.mamba_head_dim), step, -jnp.exp(w["mamba_a_log"]) * step)


@jax.named_scope("gated_norm")
def gated(
    out: jax.Array, values: jax.Array, gate: jax.Array, w: Weights, m: ModelConfig
) -> jax.Array:
    """Add the values, multiply by the gate, and normalize each group: [B, T, H P], gate's dtype.

    Args:     out, values: float32 [B, T, H, P]. gate: [B, T, H P].
    """
    out = (out + w["mamba_d"][:, None] * values).reshape(gate.shape)
    out = out * jax.nn.silu(gate.astype(jnp.float32))
    groups = out.reshape(*out.shape[:2], m.mamba_num_groups // lax.axis_size(TENSOR), -1)
    scale = lax.rsqrt(jnp.mean(groups**2, axis=-1, keepdims=True) + m.norm_eps)
    return ((groups * scale).reshape(out.shape) * w["mamba_norm"]).astype(gate.dtype)
