"""Boxes: parts of arrays, as the begin and the end in each dim."""

import math
from collections.abc import Iterable

#: A part of an array: the begin and the end in each dim.
type Box = tuple[tuple[int, int], ...]


def volume(box: Box) -> int:
    """Return the number of elements; 1 for the box of a scalar."""
    return math.prod(max(end - begin, 0) for begin, end in box)


def intersection(one: Box, other: Box) -> Box:
    """Return the common part of two boxes of an array, which may be empty."""
    edges = zip(one, other, strict=True)
    return tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in edges)


def covers(pieces: Iterable[Box], box: Box) -> bool:
    """Whether pieces cover a box. No two of them may have a common element."""
    return sum(volume(intersection(piece, box)) for piece in pieces) == volume(box)


def slices(part: Box, whole: Box) -> tuple[slice, ...]:
    """Return the place of a part in an array that holds only the box `whole`."""
    edges = zip(part, whole, strict=True)
    return tuple(slice(a[0] - b[0], a[1] - b[0]) for a, b in edges)
