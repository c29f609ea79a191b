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

from jaxpar.components.recurrent import GatedDeltaNet
from jaxpar.config import Config
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import NormOutput, rms_norm
from jaxpar.model import lora
from jaxpar.model.attention_context import AttentionContext, component
from jaxpar.model.held import (
    STATE,
    HeldSize,
    NewTokens,
    State,
    empty_state,
    later,
    latest,
    within,
)
from jaxpar.model.layer import Computation
from jaxpar.model.linear import products, row_parallel
from jaxpar.model.recurrent.convolution import causal_convolution
from jaxpar.model.recurrent.delta_rule import delta_heads, delta_rule, delta_step
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]


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
    a, positions = component(context, GatedDeltaNet), context.positions
    assert positions is not None, "made with the context of a model that has such layers"
    projected = split(named(h.map(project, w).in_order(), "qkv"), a)
    q, k, v = heads(
        causal_convolution(projected.mixed, w["delta_conv"], positions), a, projected.mixed.dtype
    )
    rates = gates(projected, w, a)
    out, _ = delta_rule(q, k, v, *rates, positions == 0, a.chunk, ex.cfg.compute.recurrent_backend)
    out = named(gated(out, projected.gate, w, a), "attn_out")
    return h.split(out).map(row_parallel, w, "delta_out", "attn_out")


@jax.named_scope("in_projection")
def project(h: NormOutput, w: Weights) -> jax.Array:
    """Compute all projections of the input by one column-parallel matmul, [B, T, columns]."""
    (y,) = products(h.operand, [w["delta_in"]], "attn_norm")
    return lora.add_side_by_side(h.scaled(y), h.operand, w, GatedDeltaNet.inputs)


def split(y: jax.Array, a: GatedDeltaNet) -> DeltaNetProjections:
    """Split the result of `project`."""
    sizes = column_sizes(a, lax.axis_size(TENSOR))
    mixed = sum(sizes[:3])
    ends = [mixed, mixed + sizes[3], mixed + sizes[3] + sizes[4]]
    mixed_y, gate, rate, step = jnp.split(y, ends, axis=-1)
    gate = gate.reshape(*gate.shape[:-1], -1, a.value_head_dim)
    return DeltaNetProjections(mixed_y, gate, rate, step)


def column_sizes(a: GatedDeltaNet, tensor: int) -> tuple[int, ...]:
    """Return a rank's columns of `delta_in`: queries, keys, values, gate, rate and step."""
    keys = a.num_key_heads * a.key_head_dim // tensor
    heads = a.num_value_heads // tensor
    values = heads * a.value_head_dim
    return keys, keys, values, values, heads, heads


def heads(mixed: jax.Array, a: GatedDeltaNet, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys [B, T, G, K] and values [B, T, H, V] from the convolution's output.

    Args:     mixed: float32 [B, T, C]. dtype: of the result, the compute dtype.
    """
    return delta_heads(mixed, column_sizes(a, lax.axis_size(TENSOR))[0], a, dtype)


def gates(
    projected: DeltaNetProjections, w: Weights, a: GatedDeltaNet
) -> tuple[jax.Array, jax.Array]:
    """Compute the logarithm of the decay, and the rate, of each token and head: float32 [B, T, H].

    Source:   Gu & Dao 2023 (2312.00752), section 3.2, for the decay; Grazzi et al. 2024
              (2411.12537), for rates of up to 2.
    """
    rate, step = (x.astype(jnp.float32) for x in (projected.rate, projected.step))
    log_decay = -jnp.exp(w["delta_a_log"]) * jax.nn.softplus(step + w["delta_dt_bias"])
    rate = jax.nn.sigmoid(rate)
    return log_decay, 2 * rate if a.allow_neg_eigval else rate


@jax.named_scope("gated_norm")
def gated(out: jax.Array, gate: jax.Array, w: Weights, a: GatedDeltaNet) -> jax.Array:
    """Normalize each head and multiply by the gate: the heads side by side, in the gate's dtype.

    Args:     out: float32 [B, T, H, V]. gate: [B, T, H, V].
    Returns:  [B, T, H V].
    """
    normalized = rms_norm(out, w["delta_norm"], a.norm_eps)
    gated = normalized * jax.nn.silu(gate.astype(jnp.float32))
    return gated.astype(gate.dtype).reshape(*gate.shape[:2], -1)


# --------------------------------------------------------------------------------- generation


def held(a: GatedDeltaNet, size: HeldSize) -> State:
    """Return the state before the first token."""
    shape = a.num_value_heads // size.tensor, a.key_head_dim, a.value_head_dim
    channels = sum(column_sizes(a, size.tensor)[:3])
    return empty_state(shape, a.conv_kernel_size, channels, size)


def decode(
    h: NormOutput, w: Weights, context: AttentionContext, held: State, new: NewTokens, cfg: Config
) -> tuple[jax.Array, State]:
    """Compute the heads of complete prompts, or of one more token each, and the state after them.

    Returns:  (this tensor rank's partial sum [B, T, D]; the state). Padding leaves it as it is.
    """
    a, positions, lengths = component(context, GatedDeltaNet), new.positions, new.lengths
    projected = split(project(h, w), a)
    tail = None if lengths is not None else held.tail
    mixed = causal_convolution(projected.mixed, w["delta_conv"], positions, tail)
    q, k, v = heads(mixed, a, projected.mixed.dtype)
    log_decay, rate = gates(projected, w, a)
    if lengths is not None:
        log_decay, rate = (within(positions, lengths, x) for x in (log_decay, rate))
        begins, backend = positions == 0, cfg.compute.recurrent_backend
        out, matrix = delta_rule(q, k, v, log_decay, rate, begins, a.chunk, backend)
        held = State(matrix, latest(projected.mixed, lengths, a.conv_kernel_size))
    else:
        q, k, v, log_decay, rate = (x[:, 0] for x in (q, k, v, log_decay, rate))
        out, matrix = delta_step(q, k, v, log_decay, rate, held.matrix)
        out, held = out[:, None], State(matrix, later(held, projected.mixed))
    out = gated(out, projected.gate, w, a)
    return row_parallel(out, w, "delta_out", "attn_out"), held


DELTA_NET = Computation("delta_net", mix, decode, held, STATE)
