"""Recurrent layers in generation: what they hold between tokens, whatever the length of the text.

Runs on a mesh with only the tensor axis, as `model/decode.py`.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.config import ModelConfig
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.recurrent.convolution import causal_convolution
from jaxpar.model.recurrent.delta_net import column_sizes, gated, gates, heads, project, split
from jaxpar.model.recurrent.delta_rule import delta_rule, delta_step
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]


@flax.struct.dataclass
class State:
    """What a layer holds of each row's text."""

    matrix: Any
    """float32 [B, H/tensor, K, V]."""
    tail: Any
    """[B, W-1, C/tensor] in the compute dtype: the latest inputs of the convolution."""


#: How the arrays are split over a mesh.
SPEC = State(PartitionSpec(None, TENSOR), PartitionSpec(None, None, TENSOR))


def state_bytes(m: ModelConfig, rows: int, tensor: int) -> int:
    """Return the bytes of one layer's state on one device."""
    state = jax.eval_shape(lambda: _empty(m, rows, tensor))
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))


def empty_state(m: ModelConfig, rows: int) -> State:
    """Return this device's shard of the state before the first token."""
    return _empty(m, rows, lax.axis_size(TENSOR))


def _empty(m: ModelConfig, rows: int, tensor: int) -> State:
    heads = m.linear_num_value_heads // tensor
    matrix = jnp.zeros((rows, heads, m.linear_key_head_dim, m.linear_value_head_dim), jnp.float32)
    channels = sum(column_sizes(m, tensor)[:3])
    return State(matrix, jnp.zeros((rows, m.conv_kernel_size - 1, channels), m.dtype))


def prompt(
    h: NormOutput, w: Weights, positions: jax.Array, lengths: jax.Array, m: ModelConfig
) -> tuple[jax.Array, State]:
    """Compute the heads of complete prompts, and the state after each row's last token.

    Args:     h: of [B, T, D]. positions: int32 [B, T], from 0. lengths: int32 [B]; what follows
              in a row is padding, which leaves the state as it is.
    Returns:  (the heads side by side, [B, T, H V]; the state).
    """
    projected = split(project(h, w), m)
    q, k, v = heads(causal_convolution(projected.mixed, w["delta_conv"], positions), m)
    log_decay, rate = (
        jnp.where((positions < lengths[:, None])[..., None], a, 0.0) for a in gates(projected, w)
    )
    out, matrix = delta_rule(q, k, v, log_decay, rate, positions == 0, m.recurrent_chunk)
    count = m.conv_kernel_size - 1
    latest = lengths[:, None] - count + jnp.arange(count)
    tail = jnp.take_along_axis(projected.mixed, jnp.maximum(latest, 0)[..., None], axis=1)
    return gated(out, projected.gate, w, m), State(matrix, tail)


def token(
    h: NormOutput, w: Weights, positions: jax.Array, held: State, m: ModelConfig
) -> tuple[jax.Array, State]:
    """Compute the heads of one more token of each row, and the new state.

    Args:     h: of [B, 1, D]. positions: int32 [B, 1]. held: the state before.
    Returns:  as `prompt`.
    """
    projected = split(project(h, w), m)
    mixed = causal_convolution(projected.mixed, w["delta_conv"], positions, held.tail)
    q, k, v, log_decay, rate = (a[:, 0] for a in (*heads(mixed, m), *gates(projected, w)))
    out, matrix = delta_step(q, k, v, log_decay, rate, held.matrix)
    tail = jnp.concatenate((held.tail[:, 1:], projected.mixed), axis=1)
    return gated(out[:, None], projected.gate, w, m), State(matrix, tail)
