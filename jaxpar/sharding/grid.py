"""Boxes: parts of arrays, as the slice of each dim. Its begin and end are in the array.

Imports no JAX.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import jax

type Box = tuple[slice, ...]


def grid(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes of a regular grid of chunks, in row-major order."""
    for at in np.ndindex(*(-(-n // c) for n, c in zip(shape, chunk, strict=True))):
        yield tuple(
            slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(at, chunk, shape, strict=True)
        )


def boxes_of(
    shape: tuple[int, ...], sharding: "jax.sharding.Sharding", *, everywhere: bool = False
) -> "dict[Box, list[jax.Device]]":
    """Return the parts of an array that devices hold, each with its devices.

    Args:     everywhere: also the devices of other processes.
    """
    found: dict[Box, list[jax.Device]] = {}
    here, all_ = sharding.addressable_devices_indices_map, sharding.devices_indices_map
    for device, index in (all_ if everywhere else here)(shape).items():
        assert index is not None
        box = tuple(slice(*part.indices(n)[:2]) for part, n in zip(index, shape, strict=True))
        found.setdefault(box, []).append(device)
    return found


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(max(part.stop - part.start, 0) for part in box)


def volume(box: Box) -> int:
    """Return the number of elements; 1 for the box of a scalar."""
    return math.prod(extent(box))


def intersection(one: Box, other: Box) -> Box:
    """Return the common part of two boxes of an array, which may be empty."""
    dims = zip(one, other, strict=True)
    return tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in dims)


def covers(pieces: Iterable[Box], box: Box) -> bool:
    """Whether pieces cover a box. No two of them may have a common element."""
    return sum(volume(intersection(piece, box)) for piece in pieces) == volume(box)


def within(part: Box, whole: Box) -> Box:
    """Return the place of a part in an array that holds only the box `whole`."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, whole, strict=True)
    )
