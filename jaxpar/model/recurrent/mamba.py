"""Mamba-2, as a branch of a layer in place of attention.

    project     an output gate, values, keys, queries, and a time step per head: one matmul
    convolve    values, keys and queries, each channel over the latest tokens, then SiLU
    recur       values times the time step, into a state that decays
    gate        plus the value itself; times SiLU of the gate; RMSNorm of each group

Published code calls values x, keys B and queries C. Groups, with their heads, are split over
TENSOR, and nothing before the output projection communicates over it.

Source:   Dao & Gu 2024 (2405.21060), section 7.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.recurrent import Mamba2
from jaxpar.config import Config
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels import recurrence
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import lora
from jaxpar.model.attention_context import AttentionContext, component
from jaxpar.model.held import STATE, HeldSize, NewTokens, State, empty_state, later, latest, within
from jaxpar.model.layer import Computation
from jaxpar.model.linear import products, row_parallel
from jaxpar.model.recurrent.convolution import causal_convolution
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.recurrence import is_split, state_before
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]


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
    a, positions = component(context, Mamba2), context.positions
    assert positions is not None, "made with the context of a model that has such layers"
    projected = split(named(h.map(project, w).in_order(), "qkv"), a)
    x = inputs(projected, causal_convolution(projected.mixed, w["mamba_conv"], positions), w, a)
    recurrence = x.queries, x.keys, x.written, x.log_decay
    out, _ = state_space(*recurrence, positions == 0, a.chunk, ex.cfg.compute.recurrent_backend)
    out = named(gated(out, x.values, projected.gate, w, a), "attn_out")
    return h.split(out).map(row_parallel, w, "mamba_out", "attn_out")


@jax.named_scope("in_projection")
def project(h: NormOutput, w: Weights) -> jax.Array:
    """Compute all projections of the input by one column-parallel matmul, [B, T, columns]."""
    (y,) = products(h.operand, [w["mamba_in"]], "attn_norm")
    return lora.add_side_by_side(h.scaled(y), h.operand, w, Mamba2.inputs)


def split(y: jax.Array, a: Mamba2) -> MambaProjections:
    """Split the result of `project`."""
    gate, *mixed, _ = column_sizes(a, lax.axis_size(TENSOR))
    return MambaProjections(*jnp.split(y, [gate, gate + sum(mixed)], axis=-1))


def column_sizes(a: Mamba2, tensor: int) -> tuple[int, ...]:
    """Return a rank's columns of `mamba_in`: gate, values, keys, queries and step."""
    heads = a.num_heads // tensor
    values, keys = heads * a.head_dim, a.num_groups // tensor * a.state_size
    return values, values, keys, keys, heads


def inputs(projected: MambaProjections, mixed: jax.Array, w: Weights, a: Mamba2) -> MambaInputs:
    """Compute what the recurrence reads.

    Args:     mixed: float32 [B, T, C], the convolution's output, without its bias.
    """
    _, values, keys, _, _ = column_sizes(a, lax.axis_size(TENSOR))
    mixed = jax.nn.silu(mixed + w["mamba_conv_bias"])
    v, k, q = jnp.split(mixed, [values, values + keys], axis=-1)
    by = lambda x, dim: x.reshape(*x.shape[:2], -1, dim)  # noqa: E731
    q, k = (by(x, a.state_size).astype(projected.mixed.dtype) for x in (q, k))
    step = jax.nn.softplus(projected.step.astype(jnp.float32) + w["mamba_dt_bias"])
    step = jnp.maximum(step, a.min_step)
    return MambaInputs(q, k, by(v, a.head_dim), step, -jnp.exp(w["mamba_a_log"]) * step)


@jax.named_scope("gated_norm")
def gated(out: jax.Array, values: jax.Array, gate: jax.Array, w: Weights, a: Mamba2) -> jax.Array:
    """Add the values, multiply by the gate, and normalize each group: [B, T, H P], gate's dtype.

    Args:     out, values: float32 [B, T, H, P]. gate: [B, T, H P].
    """
    out = (out + w["mamba_d"][:, None] * values).reshape(gate.shape)
    out = out * jax.nn.silu(gate.astype(jnp.float32))
    groups = out.reshape(*out.shape[:2], a.num_groups // lax.axis_size(TENSOR), -1)
    scale = lax.rsqrt(jnp.mean(groups**2, axis=-1, keepdims=True) + a.norm_eps)
    return ((groups * scale).reshape(out.shape) * w["mamba_norm"]).astype(gate.dtype)


# --------------------------------------------------------------------------------- generation


def held(a: Mamba2, size: HeldSize) -> State:
    """Return the state before the first token."""
    shape = a.num_heads // size.tensor, a.state_size, a.head_dim
    channels = sum(column_sizes(a, size.tensor)[1:4])
    return empty_state(shape, a.conv_kernel_size, channels, size)


def decode(
    h: NormOutput, w: Weights, context: AttentionContext, held: State, new: NewTokens, cfg: Config
) -> tuple[jax.Array, State]:
    """Compute the heads of complete prompts, or of one more token each, and the state after them.

    Returns:  (this tensor rank's partial sum [B, T, D]; the state). Padding leaves it as it is.
    """
    a, positions, lengths = component(context, Mamba2), new.positions, new.lengths
    projected = split(project(h, w), a)
    tail = None if lengths is not None else held.tail
    mixed = causal_convolution(projected.mixed, w["mamba_conv"], positions, tail)
    x = inputs(projected, mixed, w, a)
    if lengths is not None:
        step, log_decay = (within(positions, lengths, y) for y in (x.step, x.log_decay))
        x = x._replace(step=step, log_decay=log_decay)
        how = positions == 0, a.chunk, cfg.compute.recurrent_backend
        out, matrix = state_space(x.queries, x.keys, x.written, x.log_decay, *how)
        held = State(matrix, latest(projected.mixed, lengths, a.conv_kernel_size))
    else:
        q, k, v, log_decay = (y[:, 0] for y in (x.queries, x.keys, x.written, x.log_decay))
        out, matrix = state_space_step(q, k, v, log_decay, held.matrix)
        out, held = out[:, None], State(matrix, later(held, projected.mixed))
    out = gated(out, x.values, projected.gate, w, a)
    return row_parallel(out, w, "mamba_out", "attn_out"), held


# --------------------- Mamba-2's recurrence of a matrix for each head: in chunks, and for one token
#
#     S_t = a_t S_{t-1} + k_t v_t^T         o_t = S_t^T q_t
#
# a_t is a decay between 0 and 1. S is [N, P], float32. Heads of a group share queries and keys, so
# that products of these are computed once for all of them. `kernels/recurrence` computes chunks of
# tokens. Here is what a sharded sequence needs besides.
#
# G counts one tensor rank's groups, H its heads, a multiple of G.
#
# Source:   Dao & Gu 2024 (2405.21060), section 6: state space duality.


class _Change(NamedTuple):
    """What some tokens do to the state."""

    decay: jax.Array
    """[B, H, 1, 1]."""
    added: jax.Array
    """[B, H, N, P]."""

    def apply(self, state: jax.Array) -> jax.Array:
        return self.decay * state + self.added


@jax.named_scope("state_space")
def state_space(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    begins: jax.Array,
    size: int,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to complete sequences, each shard of which is in text order.

    Args:     q, k: [B, T/sequence, G, N]. v: [B, T/sequence, H, P]. log_decay: float32
              [B, T/sequence, H]. begins: bool [B, T/sequence], the first tokens of documents, which
              see no earlier state. size: tokens of a chunk. backend: that of
              `kernels.recurrence.state_space`.
    Returns:  (float32 [B, T/sequence, H, P]; the state after the last token, float32 [B, H, N, P]).
    Communication: that of `state_before` over SEQUENCE: a matrix [N, P] of each row and head.
    """

    def run(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return recurrence.state_space(q, k, v, log_decay, begins, state, size, backend)

    state = varying(jnp.zeros((*v.shape[::2], q.shape[-1], v.shape[-1])))
    if is_split():
        whole = jnp.exp(jnp.sum(log_decay, axis=1))
        kept = jnp.where(jnp.any(begins, axis=1)[:, None], 0.0, whole)[..., None, None]
        state = state_before(_Change(kept, run(state)[1]), _Change.apply, state)
    return run(state)


def state_space_step(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to one token.

    Args:     q, k: [B, G, N]. v: [B, H, P]. log_decay: float32 [B, H]. state: float32 [B, H, N, P].
    Returns:  (float32 [B, H, P]; the new state).
    """
    heads = lambda a: jnp.repeat(a.astype(jnp.float32), v.shape[1] // a.shape[1], 1)  # noqa: E731
    state = jnp.exp(log_decay)[..., None, None] * state
    state = state + heads(k)[..., :, None] * v.astype(jnp.float32)[..., None, :]
    return jnp.einsum("bhnp,bhn->bhp", state, heads(q)), state


MAMBA = Computation("mamba", mix, decode, held, STATE)
