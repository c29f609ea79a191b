"""The language of the tables in `families.py`: where a matrix of ours lies in a published model.

An `Entry` names a parameter and the tensors that it is stacked from, with the dimensions of both
as letters: the shape letters of `sharding/axes.py`, L for the layer and E for the expert.

    Entry("layers/wq", "model.layers.{L}.self_attn.q_proj.weight", "LDHK", "HK D")

says that `layers/wq` is [L, D, H, K], and that each layer's tensor on disk is [H*K, D]. Everything
else follows: names, shapes, and in both directions which numbers go where. Nothing is permuted:
both sides turn the first half of a head's dims against the second (RoPE), as published.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxpar.config import ModelConfig
from jaxpar.sharding.grid import Box, grid

#: Of the dimensions that are contiguous in the source and in the destination: 64 KB of float32.
TILE = 256, 64

type Sizes = dict[str, int]


@dataclass(frozen=True)
class Entry:
    """A parameter, and the tensors that hold it."""

    path: str
    """Stable name of ours, as `params.flat` gives it."""
    name: str
    """Name of a tensor, with {L} and {E} for the numbers of layer and expert."""
    ours: str
    """Dimensions of ours, a letter each."""
    theirs: str
    """Dimensions of the tensor, row-major; letters side by side are flattened into one."""

    @property
    def stacked(self) -> str:
        """The leading dimensions of ours along which tensors are stacked."""
        return "".join(letter for letter in self.ours if letter not in self.theirs)

    @property
    def inner(self) -> str:
        """The dimensions of ours within one tensor."""
        return self.ours[len(self.stacked) :]


def sizes_of(m: ModelConfig) -> Sizes:
    """What each letter stands for in a model."""
    return {
        "L": m.num_layers,
        "D": m.d_model,
        "H": m.num_heads,
        "G": m.num_kv_heads,
        "K": m.head_dim,
        "F": m.d_ff,
        "V": m.vocab_size,
        "E": m.num_experts,
    }


def shape_of(letters: str, sizes: Sizes) -> tuple[int, ...]:
    """The shape that letters stand for."""
    return tuple(sizes[letter] for letter in letters)


def tensor_shape(entry: Entry, sizes: Sizes) -> tuple[int, ...]:
    """The shape of each of the entry's tensors on disk."""
    return tuple(math.prod(shape_of(group, sizes)) for group in entry.theirs.split())


def tensor_name(entry: Entry, at: tuple[int, ...]) -> str:
    """Name of the tensor at a place in the stacked dimensions."""
    return entry.name.format(**dict(zip(entry.stacked, at, strict=True)))


def tensor_names(entry: Entry, sizes: Sizes) -> Iterator[str]:
    """Names of all of the entry's tensors."""
    for at in np.ndindex(*shape_of(entry.stacked, sizes)):
        yield tensor_name(entry, at)


def as_ours(tensor: np.ndarray, entry: Entry, sizes: Sizes) -> np.ndarray:
    """A view of a tensor in the order of our dimensions; writing to it writes to the tensor."""
    letters = entry.theirs.replace(" ", "")
    whole = tensor.reshape(shape_of(letters, sizes))
    return whole.transpose([letters.index(letter) for letter in entry.inner])


def tensors_in(
    entry: Entry, sizes: Sizes, box: Box, open_tensor: Callable[[str], np.ndarray]
) -> Iterator[tuple[tuple[int, ...], str, np.ndarray]]:
    """The part of each tensor that lies in a box of ours.

    Args:     box: a slice with start and stop for each dimension of ours. open_tensor: the tensor
              of a name, as a memory map: only what is touched is read or written.
    Yields:   (place in the box, name, view with the inner dimensions of the box).
    """
    n = len(entry.stacked)
    for place in np.ndindex(*(s.stop - s.start for s in box[:n])):
        at = tuple(s.start + i for s, i in zip(box, place, strict=False))
        name = tensor_name(entry, at)
        yield place, name, as_ours(open_tensor(name), entry, sizes)[box[n:]]


def read_box(
    entry: Entry, sizes: Sizes, box: Box, open_tensor: Callable[[str], np.ndarray]
) -> np.ndarray:
    """Our float32 numbers of a box, read from tensors; exact from any dtype of 32 bits or less."""
    out = np.empty([s.stop - s.start for s in box], np.float32)
    for place, _, part in tensors_in(entry, sizes, box, open_tensor):
        assign(out[place], part)
    return out


def assign(to: np.ndarray, values: np.ndarray) -> None:
    """`to[...] = values`, in tiles where one is the other transposed.

    NumPy goes along the rows of one and so misses the cache at every number of the other; tiles
    were five times faster (bfloat16 to float32, 2048 x 8192, one CPU core).
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


def chunk_shape(entry: Entry, sizes: Sizes, most: int) -> tuple[int, ...]:
    """A chunk of ours that is contiguous in a tensor: rows of it, of at most `most` numbers.

    Chunks have a size of 1 in the stacked dimensions. If a single row has more, it is a row.
    """
    letters, chunk = entry.theirs.replace(" ", ""), dict(sizes)
    for letter in letters:
        rest = math.prod(shape_of(letters[letters.index(letter) + 1 :], sizes))
        chunk[letter] = min(sizes[letter], max(1, most // rest))
        if rest <= most:
            break
    return (1,) * len(entry.stacked) + shape_of(entry.inner, chunk)
