"""Dispatch by rows: each pair of token and expert is a row that travels to the expert and back.

Each device has a queue of pairs for every device of the axis, sorted by expert, then by token. In a
round, C pairs of each queue travel, in an all-to-all whose shapes are static. What does not fit
goes in a further round: nothing is dropped. All devices of the axis run the same number of rounds,
which each knows from everybody's counts.

    slots at the token's device     [n, C]   by device of the expert, each in the order of its queue
    slots at the expert's device    [n, C]   by device of the token:  after the all-to-all
    rows                            [R]      by expert, device of the token and token

So the rows of an expert are in the order of the batch. Counts say where each slot's row is, so
that neither experts nor places travel, and the receiver sorts nothing.

    N tokens of a device   k experts per token   n devices of the axis   E experts
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.parallel.collectives import Axes, all_gather, all_to_all, varying
from jaxpar.parallel.expert.rounds import add_rounds
from jaxpar.sharding.axes import EXPERT

i32 = jnp.int32


@flax.struct.dataclass
class Queues:
    """The pairs of all rounds: from this device to every device, and from every device to it."""

    pairs: jax.Array
    """int32 [N k]: this device's pairs, sorted by expert, then by token."""
    starts: jax.Array
    """int32 [n]: where each device's queue begins in `pairs`."""
    owners: jax.Array
    """int32 [N, k]: the device of each pair's expert."""
    places: jax.Array
    """int32 [N, k]: the place of each pair in its queue."""
    arriving: jax.Array
    """int32 [n, E/n]: pairs of each device with each expert of this device."""
    rounds: jax.Array
    """int32: the rounds that the longest queue of the axis needs."""


@flax.struct.dataclass
class SentRows:
    """Values that `Exchange.out` or `Exchange.pairs_out` sent in the first round.

    The gradient is that of `home`: `Dispatch.added` and `Dispatch.by_pair` bring it there.
    """

    home: jax.Array
    """[N, D] of tokens, or [N k] of pairs: what further rounds send."""
    there: jax.Array
    """[n C, ...]: what this device received, by slot."""
    pairs: int = flax.struct.field(pytree_node=False)
    """Pairs of each value of `home`: k, or 1."""


@flax.struct.dataclass
class Exchange:
    """The plan of a round: a `Dispatch`. Integers without gradients."""

    tiles: kernels.Tiles
    pair: jax.Array
    """int32 [n C]: the pair of each slot at the token's device; some pair for an unused one."""
    slots: jax.Array
    """int32 [N, k]: the slot of each pair at the token's device; negative if not in this round."""
    row: jax.Array
    """int32 [n C]: the row of each slot at the expert's device; some row for an unused one."""
    source: jax.Array
    """int32 [R]: the slot of each row at the expert's device; negative for padding."""
    queues: Queues
    is_first: bool = flax.struct.field(pytree_node=False, default=True)
    axes: Axes = flax.struct.field(pytree_node=False, default=(EXPERT,))
    """Of the devices that exchange rows."""

    @property
    def further_rounds(self) -> jax.Array:
        """`Dispatch.further_rounds`: the same on all devices of the axis."""
        return jnp.maximum(self.queues.rounds - 1, 0)

    def out(self, x: jax.Array) -> SentRows:
        """`Dispatch.out`. Communication: an all-to-all of [n C, D] over `axes`."""
        k = self.slots.shape[1]
        return SentRows(x, self._exchanged(lax.stop_gradient(x), k), k)

    def sent_again(self, sent: SentRows, after: Any) -> tuple[SentRows, Any]:
        """`Dispatch.sent_again`: recomputed as other values that are not saved."""
        return sent, after

    def pairs_out(self, values: jax.Array) -> SentRows:
        """`Dispatch.pairs_out`. Communication: an all-to-all of [n C] over `axes`."""
        flat = values.reshape(-1)
        return SentRows(flat, self._exchanged(lax.stop_gradient(flat), 1), 1)

    @jax.named_scope("permute")
    def permuted(self, sent: SentRows, take: Callable = kernels.rows_taken) -> Any:
        """`Dispatch.permuted`. Communication: in further rounds, as `out`."""
        return take((self._there(sent),), jnp.maximum(self.source, 0), self.tiles)

    def by_row(self, sent: SentRows) -> jax.Array:
        """`Dispatch.by_row`. Communication: in further rounds, as `pairs_out`."""
        return _taken_or_0(self._there(sent), self.source)

    def added(self, y: jax.Array) -> jax.Array:
        """`Dispatch.added`. Communication: an all-to-all of [n C, D] over `axes`."""
        return kernels.rows_added(all_to_all(_taken(y, self.row), self.axes, 0, 0), self.slots)

    def by_pair(self, values: jax.Array) -> jax.Array:
        """`Dispatch.by_pair`. Communication: an all-to-all of [n C] over `axes`."""
        return _taken_or_0(all_to_all(_taken(values, self.row), self.axes, 0, 0), self.slots)

    def home(self, partial: jax.Array) -> jax.Array:
        """`Dispatch.home`: `added` and `by_pair` have brought the results home."""
        return partial

    def gradient_out(self, d_partial: jax.Array) -> SentRows:
        """`Dispatch.gradient_out`. Communication: as `out`."""
        return self.out(d_partial)

    def gradient_of_sent(self, summed: jax.Array, sent: SentRows) -> SentRows:
        """`Dispatch.gradient_of_sent`: all of it is that of `SentRows.home`."""
        rest = varying(jnp.zeros_like(sent.there))
        return SentRows(summed.reshape(sent.home.shape), rest, sent.pairs)

    def in_rounds(self, of_round: Callable[["Exchange"], Any], first: Any) -> Any:
        """`Dispatch.in_rounds`."""
        (N, k), (n, num_here) = self.slots.shape, self.queues.arriving.shape
        C, tile = len(self.pair) // n, len(self.source) // len(self.tiles.expert)
        most = -(-N * min(k, num_here) // C)

        def of_number(r: Any) -> Any:
            plan = _of_round(self.queues, r, C, tile)
            return of_round(dataclasses.replace(plan, is_first=False, axes=self.axes))

        return add_rounds(of_number, first, self.queues.rounds, most)

    def _there(self, sent: SentRows) -> jax.Array:
        return sent.there if self.is_first else self._exchanged(sent.home, sent.pairs)

    def _exchanged(self, values: jax.Array, pairs: int) -> jax.Array:
        """Send the value of each slot to the device of its expert."""
        return all_to_all(_taken(values, self.pair // pairs), self.axes, 0, 0)


@jax.named_scope("plan")
def plan_exchange(
    experts: jax.Array, num_experts: int, tile: int, slack: float, axes: Axes = (EXPERT,)
) -> Exchange:
    """Return the plan of the first round, as `dispatch.plan_rows`.

    Communication: over `axes`, an all-gather of E integers.
    """
    n = lax.axis_size(axes)
    (N, k), num_here = experts.shape, num_experts // n
    C = capacity(N, k, num_here, n, slack)
    flat, index = experts.reshape(-1), jnp.arange(N * k, dtype=i32)
    expert, pairs = lax.sort((flat, index), num_keys=1, is_stable=True)
    # By comparison: `bincount` is a scatter with collisions.
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=i32), axis=0, dtype=i32)
    every = all_gather(counts[None], axes, 0).reshape(n, n, num_here)
    lengths = jnp.sum(every, axis=2)
    own = jnp.sum(counts.reshape(n, num_here), axis=1, dtype=i32)
    starts = jnp.cumsum(own, dtype=i32) - own
    places = (
        jnp.zeros_like(flat)
        .at[pairs]
        .set(index - starts[expert // num_here], unique_indices=True, mode="promise_in_bounds")
    )
    queues = Queues(
        pairs=pairs,
        starts=starts,
        owners=experts // num_here,
        places=places.reshape(N, k),
        arriving=lax.dynamic_index_in_dim(every, lax.axis_index(axes), 1, keepdims=False),
        rounds=(jnp.max(lengths) + (C - 1)) // C,
    )
    return dataclasses.replace(_of_round(queues, 0, C, tile), axes=axes)


def capacity(N: int, k: int, num_here: int, n: int, slack: float) -> int:
    """Return C, the rows that each pair of devices exchanges in a round.

    The experts of a token are distinct, so that a device with E/n experts receives at most
    min(k, E/n) rows of a token.
    """
    return max(min(math.ceil(slack * N * k / n), N * min(k, num_here)), 1)


def _of_round(queues: Queues, r: Any, C: int, tile: int) -> Exchange:
    """Return the plan of a round: of the C pairs of each queue from r C on."""
    first, n = r * C, len(queues.starts)
    at = queues.starts[:, None] + first + jnp.arange(C, dtype=i32)
    pair = _taken(queues.pairs, jnp.minimum(at, len(queues.pairs) - 1).reshape(-1))
    here = (queues.places >= first) & (queues.places < first + C)
    slots = jnp.where(here, queues.owners * C + queues.places - first, -1)
    ends = jnp.cumsum(queues.arriving, axis=1, dtype=i32)
    begins = jnp.clip(ends - queues.arriving - first, 0, C)
    ends = jnp.clip(ends - first, 0, C)
    R = kernels.max_rows(n * C, ends.shape[1], tile)
    tiles = kernels.tiles_of(jnp.sum(ends - begins, axis=0, dtype=i32), R, tile)
    return Exchange(
        tiles=tiles,
        pair=pair,
        slots=slots,
        row=_rows_of_slots(begins, ends, tiles, C),
        source=_slots_of_rows(begins, ends, tiles, C, tile),
        queues=queues,
    )


def _earlier(begins: jax.Array, ends: jax.Array) -> jax.Array:
    """Return how many rows of an expert come before those of a device: int32 [n, E/n].

    Args:     begins, ends: int32 [n, E/n], the slots of each device in which its rows of each
              expert are.
    """
    return jnp.cumsum(ends - begins, axis=0, dtype=i32) - (ends - begins)


def _rows_of_slots(begins, ends, tiles: kernels.Tiles, C: int) -> jax.Array:
    """Return the row of each slot, int32 [n C]; 0 for an unused one."""
    slot, num_here = jnp.arange(C, dtype=i32), ends.shape[1]
    expert = jnp.sum(slot[:, None] >= ends[:, None, :], axis=2, dtype=i32)  # [n, C]
    shift = tiles.starts[:-1] + _earlier(begins, ends) - begins
    row = slot + jnp.take_along_axis(shift, jnp.minimum(expert, num_here - 1), axis=1)
    return jnp.where(expert < num_here, row, 0).reshape(-1)


def _slots_of_rows(begins, ends, tiles: kernels.Tiles, C: int, tile: int) -> jax.Array:
    """Return the slot of each row, int32 [R]; -1 for padding."""
    n, earlier = len(ends), _earlier(begins, ends)
    first_row = jnp.arange(len(tiles.expert), dtype=i32) * tile - tiles.starts[tiles.expert]
    of_expert = first_row[:, None] + jnp.arange(tile, dtype=i32)  # [R / tile, tile]
    until = (earlier + ends - begins).T[tiles.expert]  # [R / tile, n]
    device = jnp.sum(of_expert[..., None] >= until[:, None, :], axis=2, dtype=i32)
    shift = (jnp.arange(n, dtype=i32)[:, None] * C + begins - earlier).T[tiles.expert]
    slot = of_expert + jnp.take_along_axis(shift, jnp.minimum(device, n - 1), axis=1)
    return jnp.where(device < n, slot, -1).reshape(-1)


def _taken(values: jax.Array, at: jax.Array) -> jax.Array:
    return values.at[at].get(mode="promise_in_bounds")


def _taken_or_0(values: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.where(at >= 0, _taken(values, jnp.maximum(at, 0)), 0)
