"""What a mixer holds of a text during generation, and how it is given new tokens."""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.components.model import Model
from jaxpar.kernels.attention import AttentionMask
from jaxpar.model.attention_context import AttentionContext
from jaxpar.sharding.axes import TENSOR


class NewTokens(NamedTuple):
    """The tokens of a decode step."""

    first: jax.Array
    """int32 [B]: positions of the first ones."""
    positions: jax.Array
    """int32 [B, T]."""
    lengths: jax.Array | None
    """int32 [B], of complete prompts, whose tokens see only each other; None to read what is
    held."""


class HeldSize(NamedTuple):
    """The size of what a layer holds on one device."""

    rows: int
    slots: int
    tensor: int
    """Devices of the tensor axis."""
    dtype: Any
    """The compute dtype."""
    model: Model


#: How keys and values, [B, S, G/tensor, K] each, are split over a mesh.
KEYS_AND_VALUES = (PartitionSpec(None, None, TENSOR),) * 2


def write(held: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """Write [B, T, G, K] into the slots that start at each row's `first`."""
    put = lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, 0)  # noqa: E731
    return jax.vmap(put)(held, new, first)


def mask_of_slots(context: AttentionContext, held: jax.Array) -> AttentionMask:
    """Return the mask of new tokens' queries and the cache's slots, [B, S, ...]."""
    slots = jnp.broadcast_to(jnp.arange(held.shape[1], dtype=jnp.int32), held.shape[:2])
    chunks = lambda a: None if context.chunk is None else a // context.chunk  # noqa: E731
    return dataclasses.replace(
        context.mask,
        kv_positions=slots,
        q_segments=chunks(context.mask.q_positions),
        kv_segments=chunks(slots),
        in_order=False,
    )


@flax.struct.dataclass
class State:
    """What a recurrent layer holds of each row's text."""

    matrix: Any
    """float32 [B, H/tensor, K, V]."""
    tail: Any
    """[B, W-1, C/tensor] in the compute dtype: the latest inputs of the convolution."""


#: How a `State` is split over a mesh.
STATE = State(PartitionSpec(None, TENSOR), PartitionSpec(None, None, TENSOR))


def empty_state(shape: tuple[int, ...], width: int, channels: int, size: HeldSize) -> State:
    """Return a state before the first token.

    Args:     shape: of a row's matrices. width, channels: W and C of the convolution.
    """
    tail = jnp.zeros((size.rows, width - 1, channels), size.dtype)
    return State(jnp.zeros((size.rows, *shape), jnp.float32), tail)


def latest(mixed: jax.Array, lengths: jax.Array, width: int) -> jax.Array:
    """Return the last inputs of a convolution of W tokens in each row of `lengths` tokens."""
    places = lengths[:, None] - (width - 1) + jnp.arange(width - 1)
    return jnp.take_along_axis(mixed, jnp.maximum(places, 0)[..., None], axis=1)


def later(held: State, mixed: jax.Array) -> jax.Array:
    """Return the last inputs of the convolution, with those of one more token."""
    return jnp.concatenate((held.tail[:, 1:], mixed), axis=1)


def within(positions: jax.Array, lengths: jax.Array, a: jax.Array) -> jax.Array:
    """Return an array of [B, T, ...] with 0 for padding."""
    there = positions < lengths[:, None]
    return jnp.where(jnp.expand_dims(there, tuple(range(2, a.ndim))), a, 0.0)
