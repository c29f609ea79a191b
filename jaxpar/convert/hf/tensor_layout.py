"""Where a published tensor has a parameter: `Entry`, which `names.py` derives from declarations.

Letters denote the dimensions of both: those of a weight as its layer declares it are a, b, c, ...,
L is the layer, and E the expert.

    Entry("layers/wq", "model.layers.{L}.self_attn.q_proj.weight", "Labc", "bc a")

means that `layers/wq` is [L, D, H, K], and that each layer's tensor on disk is [H*K, D]. This
determines the names, the shapes, and the position of each value in both directions. No dimension is
permuted for RoPE.

A digit is a dimension of that size along which a tensor has several parameters: in "a b c2", gate
and up alternate in the last dimension, and `part` says which of the two the parameter is. A plus is
where parameters follow one another, whose numbers of values `widths` has: with K and K, "b+ a" has
for each head K rows of one parameter, then K of another.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.sharding.grid import Box, extent, grid

#: Tile sizes of the dimensions contiguous in the source and the destination: 64 KB of float32.
TILE = 256, 64

type Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Entry:
    """A parameter, and the tensors that contain it."""

    path: str
    """Stable name of the parameter, as in `params.flat`."""
    name: str
    """Name of a tensor, with {L} and {E} for the indices of layer and expert."""
    ours: str
    """Dimensions of the parameter, one letter each."""
    theirs: str
    """Dimensions of the tensor, row-major; adjacent letters are flattened into one dimension."""
    sizes: Sizes = field(default_factory=dict, hash=False)
    """The size of each letter's dimension."""
    layers: tuple[int, ...] = ()
    """The model's index of each layer L."""
    part: int = 0
    """Index of the parameter in the dimension of `theirs` that is a digit or a plus."""
    widths: tuple[int, ...] = ()
    """Values of each parameter in the dimension that is a plus in `theirs`."""
    columns: int = 0
    """Number of last dimensions that are a matrix's outputs."""

    @property
    def letters(self) -> str:
        """The dimensions of the tensor, with those of this parameter alone in place of a plus."""
        theirs = self.theirs.replace(" ", "")
        if not self.widths:
            return theirs
        index = "L" + "E" * ("{E}" in self.name)
        return theirs.replace("+", "".join(a for a in self.ours if a not in theirs + index))

    @property
    def stacked(self) -> str:
        """The leading dimensions of the parameter, along which tensors are stacked."""
        return "".join(letter for letter in self.ours if letter not in self.letters)

    @property
    def inner(self) -> str:
        """The dimensions of the parameter within one tensor."""
        return self.ours[len(self.stacked) :]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return shape_of(self.ours, self.sizes)

    @property
    def is_part(self) -> bool:
        """Whether its tensors have other parameters, too."""
        return not self.theirs.replace(" ", "").isalpha()


def shape_of(letters: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape for a string of letters and digits."""
    return tuple(int(d) if d.isdigit() else sizes[d] for d in letters)


def tensor_shape(entry: Entry) -> tuple[int, ...]:
    """Return the shape of each of the entry's tensors on disk."""
    return tuple(math.prod(_whole(group, entry)) for group in entry.theirs.split())


def _whole(letters: str, entry: Entry) -> tuple[int, ...]:
    """Return the shape for dimensions of a tensor, with the size of all parameters for a plus."""
    total = sum(entry.widths)
    dims = letters.replace(" ", "")
    return tuple(total if d == "+" else shape_of(d, entry.sizes)[0] for d in dims)


def _index(dim: str, entry: Entry) -> int | slice:
    """Return where a parameter is in a dimension of a tensor."""
    if dim == "+":
        first = sum(entry.widths[: entry.part])
        return slice(first, first + entry.widths[entry.part])
    return (entry.part if int(dim) > 1 else 0) if dim.isdigit() else slice(None)


def tensor_name(entry: Entry, at: tuple[int, ...]) -> str:
    """Return the name of the tensor at an index of the stacked dimensions."""
    index = dict(zip(entry.stacked, at, strict=True))
    if "L" in index:
        index["L"] = entry.layers[index["L"]]
    return entry.name.format(**index)


def tensor_names(entry: Entry) -> Iterator[str]:
    """Yield the names of all of the entry's tensors."""
    for at in np.ndindex(*shape_of(entry.stacked, entry.sizes)):
        yield tensor_name(entry, at)


def _view(a: np.ndarray, at: Sequence[int | slice]) -> np.ndarray:
    """Return a view of an array, also of a single number."""
    whole: Any = (*at, ...)
    return a[whole]


def as_ours(tensor: np.ndarray, entry: Entry) -> np.ndarray:
    """Return a view of a tensor in the parameter's order of dimensions; writes go to the tensor."""
    dims = entry.theirs.replace(" ", "")
    whole = tensor.reshape(_whole(dims, entry))
    ours = _view(whole, [_index(dim, entry) for dim in dims])
    kept = "".join(dim for dim in entry.letters if not dim.isdigit())
    # Splits the dimension of several parameters into this one's; the others keep theirs.
    ours = ours.reshape(shape_of(kept, entry.sizes), copy=False)
    return ours.transpose([kept.index(letter) for letter in entry.inner])


def tensors_in(
    entry: Entry, box: Box, open_tensor: Callable[[str], np.ndarray]
) -> Iterator[tuple[tuple[int, ...], str, np.ndarray]]:
    """Yield the part of each tensor that is in a box of the parameter.

    Args:     box: a slice with start and stop for each dimension of the parameter. open_tensor:
              opens a tensor by name as a memory map, so that only parts in use are read or written.
    Yields:   (index in the box, name, view with the inner dimensions of the box).
    """
    n = len(entry.stacked)
    for place in np.ndindex(extent(box[:n])):
        at = tuple(s.start + i for s, i in zip(box, place, strict=False))
        name = tensor_name(entry, at)
        yield place, name, _view(as_ours(open_tensor(name), entry), box[n:])


def read_box(entry: Entry, box: Box, open_tensor: Callable[[str], np.ndarray]) -> np.ndarray:
    """Read a box of a parameter as float32 from tensors; exact for dtypes of up to 32 bits."""
    out = np.empty(extent(box), np.float32)
    for place, _, part in tensors_in(entry, box, open_tensor):
        assign(_view(out, place), part)
    return out


def assign(to: np.ndarray, values: np.ndarray) -> None:
    """Assign `to[...] = values`, in tiles if one is transposed.

    NumPy iterates along the rows of one array, and so misses the cache at every value of the other.
    Tiles were five times faster (bfloat16 to float32, 2048 x 8192, one CPU core).
    """
    long = [dim for dim, n in enumerate(to.shape) if n > 1]
    rows = [min(long, key=lambda dim: a.strides[dim], default=0) for a in (values, to)]
    if rows[0] == rows[1]:
        to[...] = values
        return
    tile = [1] * to.ndim
    for dim, size in zip(rows, TILE, strict=True):
        tile[dim] = size
    for box in grid(to.shape, tuple(tile)):
        to[box] = values[box].astype(to.dtype)


def chunk_shape(entry: Entry, most: int) -> tuple[int, ...]:
    """Return a chunk shape of the parameter that is contiguous in a tensor.

    A chunk consists of rows of the tensor with at most `most` values, or of one row if it has more.
    Its size is 1 in the stacked dimensions.
    """
    dims, sizes, chunk = entry.letters, entry.sizes, dict(entry.sizes)
    for at, dim in enumerate(dims):
        if dim.isdigit():
            continue
        rest = math.prod(shape_of(dims[at + 1 :], sizes))
        chunk[dim] = min(sizes[dim], max(1, most // rest))
        if rest <= most:
            break
    return (1,) * len(entry.stacked) + shape_of(entry.inner, chunk)
