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

from jaxpar.components.recurrent import KimiDeltaAttention
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
from jaxpar.model.recurrent.delta_rule import delta_heads, delta_rule_by_channel, delta_step
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]


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
    a, positions = component(context, KimiDeltaAttention), context.positions
    assert positions is not None, "made with the context of a model that has such layers"
    projected = split([named(y, "qkv") for y in h.map(project, w).in_order()], a)
    q, k, v = heads(
        causal_convolution(projected.mixed, w["kda_conv"], positions), a, projected.mixed.dtype
    )
    begins, rates = positions == 0, (log_decay(projected, w, a), rate(projected))
    out, _ = delta_rule_by_channel(q, k, v, *rates, begins, a.chunk)
    out = named(gated(out, projected.gate, w, a), "attn_out")
    return h.split(out).map(row_parallel, w, "kda_out", "attn_out")


@jax.named_scope("in_projection")
def project(h: NormOutput, w: Weights) -> list[jax.Array]:
    """Compute the products with `kda_in` and `kda_gates`, [B, T, columns] each.

    The second is in the compute dtype also in float8: decays of many tokens are multiplied, and
    gradients of latents are sums over tensor ranks, which would each be rounded.
    """
    (mixed,) = products(h.operand, [w["kda_in"]], "attn_norm")
    mixed = lora.add_side_by_side(h.scaled(mixed), h.operand, w, KimiDeltaAttention.inputs)
    x = h.array()
    (gates,) = products(x, [w["kda_gates"]], "attn_norm")
    return [mixed, lora.add_side_by_side(h.scaled(gates), x, w, KimiDeltaAttention.gates)]


def split(projected: Sequence[jax.Array], a: KimiDeltaAttention) -> KimiDeltaProjections:
    """Split the results of `project`."""
    mixed, gates = projected
    latent = a.value_head_dim
    return KimiDeltaProjections(mixed, *jnp.split(gates, [latent, 2 * latent], axis=-1))


def column_sizes(a: KimiDeltaAttention, tensor: int) -> tuple[int, ...]:
    """Return a rank's columns: queries, keys and values; two latents and rate."""
    heads, latent = a.num_heads // tensor, a.value_head_dim
    keys, values = heads * a.key_head_dim, heads * a.value_head_dim
    return keys, keys, values, latent, latent, heads


def heads(
    mixed: jax.Array, a: KimiDeltaAttention, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys [B, T, H, K] and values [B, T, H, V] from the convolution's output.

    Args:     mixed: float32 [B, T, C]. dtype: of the result, the compute dtype.
    """
    return delta_heads(mixed, column_sizes(a, lax.axis_size(TENSOR))[0], a, dtype)


@jax.named_scope("decay")
def log_decay(projected: KimiDeltaProjections, w: Weights, a: KimiDeltaAttention) -> jax.Array:
    """Compute the logarithm of the decay of each token, head and channel: float32 [B, T, H, K]."""
    (step,) = products(projected.decay, [w["kda_f_b"]], "qkv")
    step = step.astype(jnp.float32).reshape(*step.shape[:-1], -1, a.key_head_dim)
    return -jnp.exp(w["kda_a_log"])[:, None] * jax.nn.softplus(step + w["kda_dt_bias"])


def rate(projected: KimiDeltaProjections) -> jax.Array:
    """Compute the rate of the write of each token and head: float32 [B, T, H]."""
    return jax.nn.sigmoid(projected.rate.astype(jnp.float32))


@jax.named_scope("gated_norm")
def gated(out: jax.Array, latent: jax.Array, w: Weights, a: KimiDeltaAttention) -> jax.Array:
    """Normalize each head and multiply by the sigmoid of its gate, in the latent's dtype.

    Args:     out: float32 [B, T, H, V]. latent: [B, T, V].
    Returns:  [B, T, H V], the heads side by side.
    """
    (gate,) = products(latent, [w["kda_g_b"]], "qkv")
    normalized = rms_norm(out, w["kda_norm"], a.norm_eps)
    gated = normalized * jax.nn.sigmoid(gate.astype(jnp.float32).reshape(out.shape))
    return gated.astype(latent.dtype).reshape(*gate.shape)


# --------------------------------------------------------------------------------- generation


def held(a: KimiDeltaAttention, size: HeldSize) -> State:
    """Return the state before the first token."""
    shape = a.num_heads // size.tensor, a.key_head_dim, a.value_head_dim
    channels = sum(column_sizes(a, size.tensor)[:3])
    return empty_state(shape, a.conv_kernel_size, channels, size)


def decode(
    h: NormOutput, w: Weights, context: AttentionContext, held: State, new: NewTokens, cfg: Config
) -> tuple[jax.Array, State]:
    """Compute the heads of complete prompts, or of one more token each, and the state after them.

    Returns:  (this tensor rank's partial sum [B, T, D]; the state). Padding leaves it as it is.
    """
    a, positions, lengths = component(context, KimiDeltaAttention), new.positions, new.lengths
    projected = split(project(h, w), a)
    tail = None if lengths is not None else held.tail
    mixed = causal_convolution(projected.mixed, w["kda_conv"], positions, tail)
    decays, rates = log_decay(projected, w, a), rate(projected)
    q, k, v = heads(mixed, a, projected.mixed.dtype)
    if lengths is not None:
        decays, rates = (within(positions, lengths, x) for x in (decays, rates))
        out, matrix = delta_rule_by_channel(q, k, v, decays, rates, positions == 0, a.chunk)
        held = State(matrix, latest(projected.mixed, lengths, a.conv_kernel_size))
    else:
        q, k, v, decays, rates = (x[:, 0] for x in (q, k, v, decays, rates))
        out, matrix = delta_step(q, k, v, decays, rates, held.matrix)
        out, held = out[:, None], State(matrix, later(held, projected.mixed))
    out = gated(out, projected.gate, w, a)
    return row_parallel(out, w, "kda_out", "attn_out"), held


KIMI_DELTA = Computation("kimi_delta", mix, decode, held, STATE)
