"""Split an array into a grid of boxes."""

from collections.abc import Iterator

import numpy as np

type Box = tuple[slice, ...]


def grid(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes of a regular grid of chunks, in row-major order."""
    for at in np.ndindex(*(-(-n // c) for n, c in zip(shape, chunk, strict=True))):
        yield tuple(
            slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(at, chunk, shape, strict=True)
        )
