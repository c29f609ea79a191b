"""The row of each pair of token and expert, where every device has the tokens of all.

Rows are sorted by expert, then by token in the order of the batch. On an expert axis, the place of
a pair follows from the counts of all devices, so that no device sends rows that another must sort.

The buffer of an expert axis has R rows, fewer than could arrive. Rows that do not fit go through it
in further rounds, on that device alone: nothing is dropped, and no round communicates.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.parallel.collectives import Axes
from jaxpar.parallel.expert import tokens
from jaxpar.parallel.expert.rounds import add_rounds
from jaxpar.sharding.axes import EXPERT

i32 = jnp.int32


@flax.struct.dataclass
class Places:
    """The rows of all rounds on a device of an expert axis, as if its buffer were large enough."""

    rows: jax.Array
    """int32 [n N, k]: the row of each of a token's experts; -1 for experts of other devices."""
    starts: jax.Array
    """int32 [E/n + 1], as `Tiles.starts`."""


@flax.struct.dataclass
class RowPlan:
    """The plan of a round: a `Dispatch`. Integers without gradients."""

    tiles: kernels.Tiles
    token: jax.Array
    """int32 [R]: the token of each row; 0 for padding."""
    rows: jax.Array
    """int32 [n N, k]: the row of each of a token's experts; negative if it is not in this round."""
    places: Places | None = None
    """For further rounds. None if there can be none."""
    has_all: bool = flax.struct.field(pytree_node=False, default=True)
    """Whether every pair has its row here."""
    axes: Axes = flax.struct.field(pytree_node=False, default=(EXPERT,))
    """Of the devices that exchange tokens."""
    parts: int = flax.struct.field(pytree_node=False, default=1)
    """Arrays of `Parts`."""

    def out(self, x: jax.Array) -> kernels.Parts:
        """`Dispatch.out`. Communication: `tokens.parts_of_all`."""
        return tokens.parts_of_all(x, self.axes)

    def sent_again(self, sent: kernels.Parts, after: Any) -> tuple[kernels.Parts, Any]:
        """`Dispatch.sent_again`. Communication: `tokens.parts_of_all`, unless one array has all."""
        if self.parts == 1:
            return sent, after
        own, after = lax.optimization_barrier((sent[0], after))
        return tokens.parts_of_all(own, self.axes), after

    def pairs_out(self, values: jax.Array) -> jax.Array:
        """`Dispatch.pairs_out`. Communication: `tokens.tokens_of_all`."""
        return tokens.tokens_of_all(values, self.axes)

    @jax.named_scope("permute")
    def permuted(self, sent: kernels.Parts, take: Callable = kernels.rows_taken) -> Any:
        """`Dispatch.permuted`. Padding has the first token."""
        return take(sent, self.token, self.tiles)

    def by_row(self, sent: jax.Array) -> jax.Array:
        """`Dispatch.by_row`."""
        return _scattered(len(self.token), self.rows, sent, self.has_all)

    def added(self, y: jax.Array) -> kernels.Parts:
        """`Dispatch.added`: for the tokens of all devices, in parts that are sent as they are."""
        return tuple(kernels.rows_added(y, rows) for rows in jnp.split(self.rows, self.parts))

    def by_pair(self, values: jax.Array) -> jax.Array:
        """`Dispatch.by_pair`: for the tokens of all devices, [n N, k]."""
        if self.has_all:
            return values.at[self.rows].get(mode="promise_in_bounds")
        found = values.at[jnp.maximum(self.rows, 0)].get(mode="promise_in_bounds")
        return jnp.where(self.rows >= 0, found, 0)

    def home(self, partial: kernels.Parts) -> jax.Array:
        """`Dispatch.home`. Communication: `tokens.sent_home`."""
        return tokens.sent_home(partial, self.axes)

    def gradient_out(self, d_partial: kernels.Parts) -> kernels.Parts:
        """`Dispatch.gradient_out`: the transpose of `home` has gathered it."""
        return d_partial

    def gradient_of_sent(self, summed: Any, _: Any) -> Any:
        """`Dispatch.gradient_of_sent`: the transpose of `out` sends it home."""
        return summed

    def in_rounds(self, of_round: Callable[["RowPlan"], Any], first: Any) -> Any:
        """`Dispatch.in_rounds`: no further round communicates, and devices may differ."""
        places, R = self.places, len(self.token)
        if places is None:
            return first

        def of_number(r: Any) -> Any:
            return of_round(of_places(places, r, R, self.tile, self.axes))

        most = max_rounds(places, R, self.tile)
        return add_rounds(of_number, first, (places.starts[-1] + (R - 1)) // R, most)

    @property
    def further_rounds(self) -> jax.Array:
        """int32 scalar: the number of rounds beyond the first on this device."""
        if self.places is None:
            return jnp.int32(0)
        return jnp.maximum(self.places.starts[-1] - 1, 0) // len(self.token)

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return len(self.token) // len(self.tiles.expert)


@jax.named_scope("plan")
def plan_tokens(
    experts: jax.Array, num_experts: int, tile: int, slack: float, axes: Axes = (EXPERT,)
) -> RowPlan:
    """Return the plan of the first round, as `dispatch.plan_rows`.

    Communication: `tokens_of_all` of k integers per token and E integers.
    """
    n = tokens.group_size(axes)
    N, k = experts.shape
    flat, index = experts.reshape(-1), jnp.arange(N * k, dtype=i32)
    expert, pair = lax.sort((flat, index), num_keys=1, is_stable=True)
    # By comparison: `bincount` is a scatter with collisions.
    is_of = flat[:, None] == jnp.arange(num_experts, dtype=i32)
    counts = jnp.sum(is_of, axis=0, dtype=i32)
    if n == 1:
        R = kernels.max_rows(N * k, num_experts, tile)
        tiles = kernels.tiles_of(counts, R, tile)
        before = jnp.cumsum(counts, dtype=i32) - counts
        row = tiles.starts[expert] + index - before[expert]
        token = _scattered(R, row, pair // k)
        return RowPlan(tiles, token, _scattered(N * k, pair, row).reshape(N, k))
    before = jnp.cumsum(counts, dtype=i32) - counts
    nth = _scattered(N * k, pair, index - before[expert])
    places = _places(experts, nth.reshape(N, k), counts, n, tile, axes)
    R = buffer_rows(N * k, num_experts, n, tile, slack)
    plan = of_places(places, 0, R, tile, axes)
    return dataclasses.replace(plan, places=places) if max_rounds(places, R, tile) > 1 else plan


def buffer_rows(rows: int, num_experts: int, n: int, tile: int, slack: float) -> int:
    """Return R, the rows of the buffer of a device on an expert axis of size n.

    Args:     rows: N k, pairs of token and expert of a device.
    """
    wanted = -(-int(slack * rows) // tile) * tile + tile * (num_experts // n)
    return max(min(wanted, kernels.max_rows(n * rows, num_experts // n, tile)), tile)


def max_rounds(places: Places, R: int, tile: int) -> int:
    """Return the rounds that are needed if all tokens have all their experts on one device."""
    return -(-kernels.max_rows(places.rows.size, len(places.starts) - 1, tile) // R)


def of_places(places: Places, r: Any, R: int, tile: int, axes: Axes) -> RowPlan:
    """Return the plan of a round: of the rows from r R on, R of them."""
    first = r * R
    rows = jnp.where((places.rows >= first) & (places.rows < first + R), places.rows - first, -1)
    token = lax.broadcasted_iota(i32, rows.shape, 0)
    starts = jnp.clip(places.starts - first, 0, R)
    first_rows = jnp.arange(R // tile, dtype=i32) * tile
    expert = jnp.sum(first_rows[:, None] >= starts[1:], axis=1, dtype=i32)
    tiles = kernels.Tiles(jnp.minimum(expert, len(starts) - 2), starts, starts[-1:] // tile)
    token = _scattered(R, rows, token, False)
    parts = tokens.num_parts(axes)
    return RowPlan(tiles, token, rows, has_all=False, axes=axes, parts=parts)


def _places(
    experts: jax.Array, nth: jax.Array, counts: jax.Array, n: int, tile: int, axes: Axes
) -> Places:
    """Return the places of all devices' pairs whose experts this device has.

    Args:     experts: int32 [N, k], of this device's tokens. nth: int32 [N, k]: how many of this
              device's tokens before this one have the same expert. counts: int32 [E].
    """
    (N, k), num_here = experts.shape, len(counts) // n
    pairs = (experts * N + nth).reshape(-1)  # nth < N: a token has an expert once
    every = tokens.tokens_of_all(jnp.concatenate([pairs, counts])[None], axes)
    pairs, counts = jnp.split(every, [N * k], axis=1)
    expert, nth = lax.div(pairs, i32(N)) - lax.axis_index(axes) * num_here, lax.rem(pairs, i32(N))
    is_here = (expert >= 0) & (expert < num_here)
    counts = lax.dynamic_slice_in_dim(counts, lax.axis_index(axes) * num_here, num_here, axis=1)
    ends = jnp.cumsum((jnp.sum(counts, 0) + tile - 1) // tile * tile, dtype=i32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    rank = tokens.ranks(axes)
    comes_first = rank[:, None] > rank
    first = starts[:-1] + jnp.sum(comes_first[..., None] * counts, axis=1, dtype=i32)
    row = jnp.take_along_axis(first, jnp.where(is_here, expert, 0), axis=1) + nth
    return Places(jnp.where(is_here, row, -1).reshape(n * N, k), starts)


def _scattered(size: int, at: jax.Array, values: jax.Array, has_all: bool = True) -> jax.Array:
    """Return zeros [size] with values at distinct places.

    Args:     has_all: whether all places are in bounds. Otherwise negative ones are left out.
    """
    zeros, at, values = jnp.zeros(size, values.dtype), at.reshape(-1), values.reshape(-1)
    if has_all:
        return zeros.at[at].set(values, unique_indices=True, mode="promise_in_bounds")
    outside = size + jnp.arange(at.size, dtype=i32)
    at = jnp.where(at >= 0, at, outside)
    return zeros.at[at].set(values, unique_indices=True, mode="drop")
