"""Whole matrices of sharded parameters, for update rules that need them.

A stacked parameter has one matrix for each layer (and expert). FSDP and tensor parallelism split
every matrix over devices. Here the devices exchange shards, so that each has some of the matrices
whole, and none is at two devices. Afterwards they send the shards of the results back.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import all_gather_invariant, all_to_all, share
from jaxpar.sharding.axes import AXES, axes_of
from jaxpar.sharding.params import ParamSpec

type Axes = tuple[str, ...]


@dataclass(frozen=True)
class MatrixLayout:
    """The shape and the sharding of the matrices of a stacked parameter.

    Parameters with equal layouts can be exchanged together.

    block        a matrix's shape on a device: dims of rows, then dims of columns.
    columns      number of dims of columns.
    split        mesh axes over which each dim of `block` is split.
    repeated     mesh axes along which every device has the same shards.
    """

    block: tuple[int, ...]
    columns: int
    split: tuple[Axes, ...]
    repeated: Axes

    @property
    def axes(self) -> Axes:
        """All axes over which a matrix is split, outermost first."""
        return tuple(axis for axis in AXES if any(axis in axes for axes in self.split))


def layout_of(spec: ParamSpec, shape: tuple[int, ...], *, sharded: bool) -> MatrixLayout:
    """Return the layout of a parameter with matrices.

    Args:     shape: of the shard. sharded: whether it is one, inside the `shard_map`; if not,
              matrices are whole already.
    """
    block, dims = shape[spec.lead :], spec.partition_spec[spec.lead :]
    if not sharded:
        return MatrixLayout(block, spec.columns, ((),) * len(block), ())
    split = tuple((d,) if isinstance(d, str) else d or () for d in dims)
    used = axes_of(spec.partition_spec)
    repeated = tuple(axis for axis in AXES if axis not in used)
    return MatrixLayout(block, spec.columns, split, repeated)


def map_matrices(
    fn: Callable[[jax.Array], jax.Array], shards: Sequence[jax.Array], layout: MatrixLayout
) -> list[jax.Array]:
    """Apply a function to the whole matrices of parameters that have one layout.

    Every matrix is at one device of the mesh while `fn` runs. Zeros fill up the last devices.

    Args:     fn: [n, rows, columns] -> the same shape; matrices are independent. shards: stacked
              parameters, or arrays like them.
    Returns:  the results, sharded like `shards`.
    Communication: all-to-all over the axes that split the matrices, of the shards, twice.
              All-gather of the results over the axes that do not.
    """
    stacked = jnp.concatenate([a.reshape(-1, *layout.block) for a in shards])
    n = len(stacked)
    padded = jnp.pad(stacked, [(0, -n % _ranks(layout)), *[(0, 0)] * len(layout.block)])
    results = _to_shards(fn(_to_whole(padded, layout)), layout)[:n]
    out, start = [], 0
    for a in shards:
        count = math.prod(a.shape) // math.prod(layout.block)
        out.append(results[start : start + count].reshape(a.shape))
        start += count
    return out


def _ranks(layout: MatrixLayout) -> int:
    """Devices that share the matrices."""
    return math.prod(map(lax.axis_size, layout.axes + layout.repeated))


@jax.named_scope("exchange_matrices")
def _to_whole(x: jax.Array, layout: MatrixLayout) -> jax.Array:
    """Convert shards of n matrices to whole ones: [n, *block] -> [n / ranks, rows, columns]."""
    if layout.repeated:
        x = share(x, layout.repeated, 0)
    if layout.axes:
        x = all_to_all(x, layout.axes, 0, 0)
    sizes = [lax.axis_size(axis) for axis in layout.axes]
    x = x.reshape(*sizes, -1, *layout.block).transpose(_whole_order(layout))
    rows = math.prod(layout.block[: -layout.columns])
    rows *= math.prod(lax.axis_size(a) for axes in layout.split[: -layout.columns] for a in axes)
    return x.reshape(len(x), rows, -1)


@jax.named_scope("exchange_matrices")
def _to_shards(x: jax.Array, layout: MatrixLayout) -> jax.Array:
    """Undo `_to_whole`."""
    pieces = [len(x)]
    for axes, size in zip(layout.split, layout.block, strict=True):
        pieces += [*map(lax.axis_size, axes), size]
    order = _whole_order(layout)
    x = x.reshape(pieces).transpose([order.index(dim) for dim in range(len(order))])
    x = x.reshape(-1, *layout.block)
    if layout.axes:
        x = all_to_all(x, layout.axes, 0, 0)
    return all_gather_invariant(x, layout.repeated, 0) if layout.repeated else x


def _whole_order(layout: MatrixLayout) -> list[int]:
    """Order of dims that makes matrices of pieces.

    Pieces are [*axes, n, *block], where `axes` says which device had a piece. Their order is n, and
    then each dim of the block after the axes that split it.
    """
    first = len(layout.axes)
    order = [first]
    for dim, axes in enumerate(layout.split):
        order += [*map(layout.axes.index, axes), first + 1 + dim]
    return order
