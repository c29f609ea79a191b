"""Recurrent layers in generation: what they hold between tokens, whatever the length of the text.

Runs on a mesh with only the tensor axis, as `model/decode.py`. A `RecurrentKind` has the functions
of one kind of layer:

    prompt  complete prompts -> the heads side by side, [B, T, H V], and the state after each row's
            last token. What follows in a row is padding, which leaves the state as it is
    token   one more token of each row, and the state before -> its heads, and the new state
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.config import ModelConfig
from jaxpar.config.layout.layer_kinds import DELTA_NET, KDA, KDA_DENSE, MAMBA
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.recurrent import delta_net, kimi_delta, mamba
from jaxpar.model.recurrent.convolution import causal_convolution
from jaxpar.model.recurrent.delta_rule import delta_rule, delta_rule_by_channel, delta_step
from jaxpar.model.recurrent.state_space import state_space, state_space_step
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


@dataclass(frozen=True)
class RecurrentKind:
    """The functions of a kind of layer, on one device's heads."""

    prompt: Callable[..., tuple[jax.Array, State]]
    """(norm of [B, T, D], weights, positions int32 [B, T] from 0, lengths int32 [B], model)."""
    token: Callable[..., tuple[jax.Array, State]]
    """(norm of [B, 1, D], weights, positions int32 [B, 1], the state before, model)."""
    sizes: Callable[[ModelConfig, int], tuple[tuple[int, ...], int]]
    """(model, tensor) -> the shape of a row's matrices on one device, and its channels C."""
    output: str
    """The weight that the heads are multiplied by."""


def state_bytes(m: ModelConfig, kind: str, rows: int, tensor: int) -> int:
    """Return the bytes of one layer's state on one device. Args: kind: the layer's letter."""
    state = jax.eval_shape(lambda: _empty(m, kind, rows, tensor))
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))


def empty_state(m: ModelConfig, kind: str, rows: int) -> State:
    """Return this device's shard of the state before the first token."""
    return _empty(m, kind, rows, lax.axis_size(TENSOR))


def _empty(m: ModelConfig, kind: str, rows: int, tensor: int) -> State:
    shape, channels = KINDS[kind].sizes(m, tensor)
    tail = jnp.zeros((rows, m.conv_kernel_size - 1, channels), m.dtype)
    return State(jnp.zeros((rows, *shape), jnp.float32), tail)


def kind_of(w: Weights) -> RecurrentKind:
    """Return the functions of a layer with these weights."""
    return next(kind for kind in KINDS.values() if kind.output in w)


def _latest(mixed: jax.Array, lengths: jax.Array, m: ModelConfig) -> jax.Array:
    """Return the last inputs of the convolution in each row of `lengths` tokens."""
    count = m.conv_kernel_size - 1
    places = lengths[:, None] - count + jnp.arange(count)
    return jnp.take_along_axis(mixed, jnp.maximum(places, 0)[..., None], axis=1)


def _later(held: State, mixed: jax.Array) -> jax.Array:
    """Return the last inputs of the convolution, with those of one more token."""
    return jnp.concatenate((held.tail[:, 1:], mixed), axis=1)


def _within(positions: jax.Array, lengths: jax.Array, a: jax.Array) -> jax.Array:
    """Return an array of [B, T, ...] with 0 for padding."""
    there = positions < lengths[:, None]
    return jnp.where(jnp.expand_dims(there, tuple(range(2, a.ndim))), a, 0.0)


def _delta_net_prompt(
    h: NormOutput, w: Weights, positions: jax.Array, lengths: jax.Array, m: ModelConfig
) -> tuple[jax.Array, State]:
    projected = delta_net.split(delta_net.project(h, w), m)
    mixed = causal_convolution(projected.mixed, w["delta_conv"], positions)
    q, k, v = delta_net.heads(mixed, m)
    log_decay, rate = (_within(positions, lengths, a) for a in delta_net.gates(projected, w, m))
    how = positions == 0, m.recurrent_chunk, m.recurrent_backend
    out, matrix = delta_rule(q, k, v, log_decay, rate, *how)
    tail = _latest(projected.mixed, lengths, m)
    return delta_net.gated(out, projected.gate, w, m), State(matrix, tail)


def _delta_net_token(
    h: NormOutput, w: Weights, positions: jax.Array, held: State, m: ModelConfig
) -> tuple[jax.Array, State]:
    projected = delta_net.split(delta_net.project(h, w), m)
    mixed = causal_convolution(projected.mixed, w["delta_conv"], positions, held.tail)
    arrays = (*delta_net.heads(mixed, m), *delta_net.gates(projected, w, m))
    q, k, v, log_decay, rate = (a[:, 0] for a in arrays)
    out, matrix = delta_step(q, k, v, log_decay, rate, held.matrix)
    state = State(matrix, _later(held, projected.mixed))
    return delta_net.gated(out[:, None], projected.gate, w, m), state


def _delta_net_sizes(m: ModelConfig, tensor: int) -> tuple[tuple[int, ...], int]:
    heads = m.linear_num_value_heads // tensor
    shape = heads, m.linear_key_head_dim, m.linear_value_head_dim
    return shape, sum(delta_net.column_sizes(m, tensor)[:3])


def _kda_prompt(
    h: NormOutput, w: Weights, positions: jax.Array, lengths: jax.Array, m: ModelConfig
) -> tuple[jax.Array, State]:
    projected = kimi_delta.split(kimi_delta.project(h, w), m)
    mixed = causal_convolution(projected.mixed, w["kda_conv"], positions)
    rates = kimi_delta.log_decay(projected, w, m), kimi_delta.rate(projected)
    log_decay, rate = (_within(positions, lengths, a) for a in rates)
    how = positions == 0, m.recurrent_chunk
    out, matrix = delta_rule_by_channel(*kimi_delta.heads(mixed, m), log_decay, rate, *how)
    tail = _latest(projected.mixed, lengths, m)
    return kimi_delta.gated(out, projected.gate, w, m), State(matrix, tail)


def _kda_token(
    h: NormOutput, w: Weights, positions: jax.Array, held: State, m: ModelConfig
) -> tuple[jax.Array, State]:
    projected = kimi_delta.split(kimi_delta.project(h, w), m)
    mixed = causal_convolution(projected.mixed, w["kda_conv"], positions, held.tail)
    rates = kimi_delta.log_decay(projected, w, m), kimi_delta.rate(projected)
    q, k, v, log_decay, rate = (a[:, 0] for a in (*kimi_delta.heads(mixed, m), *rates))
    out, matrix = delta_step(q, k, v, log_decay, rate, held.matrix)
    state = State(matrix, _later(held, projected.mixed))
    return kimi_delta.gated(out[:, None], projected.gate, w, m), state


def _kda_sizes(m: ModelConfig, tensor: int) -> tuple[tuple[int, ...], int]:
    heads = m.linear_num_key_heads // tensor
    shape = heads, m.linear_key_head_dim, m.linear_value_head_dim
    return shape, sum(kimi_delta.column_sizes(m, tensor)[:3])


def _mamba_prompt(
    h: NormOutput, w: Weights, positions: jax.Array, lengths: jax.Array, m: ModelConfig
) -> tuple[jax.Array, State]:
    projected = mamba.split(mamba.project(h, w), m)
    mixed = causal_convolution(projected.mixed, w["mamba_conv"], positions)
    x = mamba.inputs(projected, mixed, w, m)
    step, log_decay = (_within(positions, lengths, a) for a in (x.step, x.log_decay))
    x = x._replace(step=step, log_decay=log_decay)
    how = positions == 0, m.recurrent_chunk, m.recurrent_backend
    out, matrix = state_space(x.queries, x.keys, x.written, x.log_decay, *how)
    tail = _latest(projected.mixed, lengths, m)
    return mamba.gated(out, x.values, projected.gate, w, m), State(matrix, tail)


def _mamba_token(
    h: NormOutput, w: Weights, positions: jax.Array, held: State, m: ModelConfig
) -> tuple[jax.Array, State]:
    projected = mamba.split(mamba.project(h, w), m)
    mixed = causal_convolution(projected.mixed, w["mamba_conv"], positions, held.tail)
    x = mamba.inputs(projected, mixed, w, m)
    q, k, v, log_decay = (a[:, 0] for a in (x.queries, x.keys, x.written, x.log_decay))
    out, matrix = state_space_step(q, k, v, log_decay, held.matrix)
    state = State(matrix, _later(held, projected.mixed))
    return mamba.gated(out[:, None], x.values, projected.gate, w, m), state


def _mamba_sizes(m: ModelConfig, tensor: int) -> tuple[tuple[int, ...], int]:
    shape = m.mamba_num_heads // tensor, m.mamba_state_size, m.mamba_head_dim
    return shape, sum(mamba.column_sizes(m, tensor)[1:4])


_KDA = RecurrentKind(_kda_prompt, _kda_token, _kda_sizes, "kda_out")

#: By the letters of `model.layer_pattern`.
KINDS = {
    DELTA_NET: RecurrentKind(_delta_net_prompt, _delta_net_token, _delta_net_sizes, "delta_out"),
    MAMBA: RecurrentKind(_mamba_prompt, _mamba_token, _mamba_sizes, "mamba_out"),
    KDA: _KDA,
    KDA_DENSE: _KDA,
}
