"""The notation of the tables in `families.py`, which map parameters to published tensors.

An `Entry` names a parameter, and the tensors that it is stacked from. Letters denote the dimensions
of both: the shape letters of `sharding/axes.py`, with L for the layer and E for the expert. Of the
first, dense layers of a mixture of experts, N is the layer, and W the feed-forward width. In latent
attention, Q and C are the latents of queries and of keys and values, A is C with the rotary key, I
the head dim of values, and B a head's keys without position and values. Of multi-token prediction,
P is the module, and its projection has X inputs of size D, and the output Y.

    Entry("layers/wq", "model.layers.{L}.self_attn.q_proj.weight", "LDHK", "HK D")

means that `layers/wq` is [L, D, H, K], and that each layer's tensor on disk is [H*K, D]. This
determines the names, the shapes, and the position of each value in both directions. No dimension is
permuted for RoPE.

A digit is a dimension of that size along which a tensor has several parameters. In "E D F2", gate
and up alternate in the last dimension, and `part` says which of the two the parameter is. In
brackets, parameters of different sizes come one after the other: "[HGG]K D" is all heads of
queries, then those of keys and of values. A plus is the same for parameters of other dimensions,
which `sections` has: with K and K, "H+ D" has for each head K rows of one parameter, then K of
another.

Of a hybrid model, L is the layer with attention, and J the layer of Gated DeltaNet, which has its
own letters: g key heads of width k, each with r value heads of width v, together m; h value heads;
and a kernel of width w. M is the layer of Mamba-2, with t heads of width p, and s groups of states
of width n. U is the layer with a feed-forward branch alone, and O the one with experts alone. T is
the layer of Kimi Delta Attention, which has the heads of Gated DeltaNet and latents of width l, and
y such a layer with a dense feed-forward. R is the rank of adapters. Of Gemma 4, a is the global
layer with heads of its own: j heads of keys, of width d.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.config import ModelConfig
from jaxpar.config.layout.layer_kinds import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    FEED_FORWARD,
    GLOBAL,
    KDA,
    KDA_DENSE,
    MAMBA,
    kinds,
    of_kind,
)
from jaxpar.sharding.grid import Box, extent, grid

#: Tile sizes of the dimensions contiguous in the source and the destination: 64 KB of float32.
TILE = 256, 64

type Sizes = dict[str, int]


@dataclass(frozen=True)
class Entry:
    """A parameter, and the tensors that contain it."""

    path: str
    """Stable name of the parameter, as in `params.flat`."""
    name: str
    """Name of a tensor, with {L}, {N} or {P} and {E} for the indices of layer and expert."""
    ours: str
    """Dimensions of the parameter, one letter each."""
    theirs: str
    """Dimensions of the tensor, row-major; adjacent letters are flattened into one dimension."""
    first: int = 0
    """The model's index of the first layer L, or of the first module P."""
    part: int = 0
    """Index of the parameter in the dimension of `theirs` that is a digit, plus or in brackets."""
    sections: tuple[str, ...] = ()
    """The dimensions of each parameter in the dimension that is a plus in `theirs`."""
    layers: tuple[int, ...] = ()
    """The model's index of each layer of the stack, if they are not neighbors."""

    @property
    def letters(self) -> str:
        """The dimensions of the tensor, with those of this parameter alone in place of a plus."""
        own = self.sections[self.part] if self.sections else ""
        return self.theirs.replace(" ", "").replace("+", own)

    @property
    def stacked(self) -> str:
        """The leading dimensions of the parameter, along which tensors are stacked."""
        return "".join(letter for letter in self.ours if letter not in self.letters)

    @property
    def inner(self) -> str:
        """The dimensions of the parameter within one tensor."""
        return self.ours[len(self.stacked) :]


def sizes_of(m: ModelConfig) -> Sizes:
    """Return the size of each letter's dimension in a model."""
    heads, key_heads = m.linear_num_value_heads, m.linear_num_key_heads
    return {
        "L": kinds(m).count(ATTENTION) - m.dense_layers,
        "a": kinds(m).count(GLOBAL),
        "j": of_kind(m, GLOBAL).num_kv_heads,
        "d": of_kind(m, GLOBAL).head_dim,
        "J": kinds(m).count(DELTA_NET),
        "M": kinds(m).count(MAMBA),
        "U": kinds(m).count(FEED_FORWARD),
        "O": kinds(m).count(EXPERTS),
        "T": kinds(m).count(KDA),
        "y": kinds(m).count(KDA_DENSE),
        "t": m.mamba_num_heads,
        "p": m.mamba_head_dim,
        "s": m.mamba_num_groups,
        "n": m.mamba_state_size,
        "g": key_heads,
        "k": m.linear_key_head_dim,
        "h": heads,
        "r": heads // key_heads,
        "v": m.linear_value_head_dim,
        "l": m.linear_value_head_dim,
        "m": heads // key_heads * m.linear_value_head_dim,
        "w": m.conv_kernel_size,
        "N": m.dense_layers,
        "W": m.dense_d_ff or m.d_ff,
        "D": m.d_model,
        "H": m.num_heads,
        "G": m.num_kv_heads,
        "K": m.head_dim,
        "F": m.d_ff,
        "V": m.vocab_size,
        "Z": m.max_positions,
        "E": m.num_experts,
        "S": m.num_shared_experts * m.d_ff,
        "Q": m.q_lora_rank or 0,
        "C": m.kv_lora_rank,
        "A": m.kv_lora_rank + m.qk_rope_head_dim,
        "I": m.value_dim,
        "B": m.qk_nope_head_dim + m.v_head_dim,
        "P": m.mtp_depth,
        "X": 2,
        "Y": m.d_model,
    }


def dims_of(letters: str) -> list[str]:
    """Split a string into dimensions: letters, digits, and letters in brackets."""
    return re.findall(r"\[\w+\]|\w|\+", letters)


def shape_of(letters: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape for a string of dimensions."""
    size = lambda d: int(d) if d.isdigit() else sum(sizes[part] for part in d.strip("[]"))  # noqa: E731
    return tuple(map(size, dims_of(letters)))


def _index(dim: str, entry: Entry, sizes: Sizes) -> int | slice:
    """Return where a parameter is in a dimension of a tensor."""
    part = entry.part
    if dim.isdigit():
        return 0 if entry.sections else part
    if dim == "+":
        own = [math.prod(shape_of(section, sizes)) for section in entry.sections]
        return slice(sum(own[:part]), sum(own[: part + 1]))
    parts = dim.strip("[]")
    if parts == dim:
        return slice(None)
    first = sum(sizes[other] for other in parts[:part])
    return slice(first, first + sizes[parts[part]])


def _letter(dim: str, part: int) -> str:
    """Return a parameter's letter in a dimension of a tensor that is no digit."""
    return dim[1 + part] if dim.startswith("[") else dim


def tensor_shape(entry: Entry, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of each of the entry's tensors on disk."""
    return tuple(math.prod(_whole(group, entry, sizes)) for group in entry.theirs.split())


def _whole(letters: str, entry: Entry, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape for dimensions of a tensor, with the size of all sections for a plus."""
    total = sum(math.prod(shape_of(section, sizes)) for section in entry.sections)
    return tuple(total if d == "+" else shape_of(d, sizes)[0] for d in dims_of(letters))


def tensor_name(entry: Entry, at: tuple[int, ...]) -> str:
    """Return the name of the tensor at an index of the stacked dimensions."""
    index = dict(zip(entry.stacked, at, strict=True))
    for letter in (letter for letter in index if letter in "LJMPUOTya"):
        index[letter] = entry.layers[index[letter]] if entry.layers else index[letter] + entry.first
    if "N" in index and entry.layers:
        index["N"] = entry.layers[index["N"]]
    return entry.name.format(**index)


def tensor_names(entry: Entry, sizes: Sizes) -> Iterator[str]:
    """Yield the names of all of the entry's tensors."""
    for at in np.ndindex(*shape_of(entry.stacked, sizes)):
        yield tensor_name(entry, at)


def _view(a: np.ndarray, at: Sequence[int | slice]) -> np.ndarray:
    """Return a view of an array, also of a single number."""
    whole: Any = (*at, ...)
    return a[whole]


def as_ours(tensor: np.ndarray, entry: Entry, sizes: Sizes) -> np.ndarray:
    """Return a view of a tensor in the parameter's order of dimensions; writes go to the tensor."""
    dims = dims_of(entry.theirs)
    whole = tensor.reshape(_whole(entry.theirs, entry, sizes))
    ours = _view(whole, [_index(dim, entry, sizes) for dim in dims])
    dims = dims_of(entry.letters)
    kept = [_letter(dim, entry.part) for dim in dims if not dim.isdigit()]
    # Splits a section into its dimensions; the others keep theirs.
    ours = ours.reshape(shape_of("".join(kept), sizes), copy=False)
    return ours.transpose([kept.index(letter) for letter in entry.inner])


def tensors_in(
    entry: Entry, sizes: Sizes, box: Box, open_tensor: Callable[[str], np.ndarray]
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
        yield place, name, _view(as_ours(open_tensor(name), entry, sizes), box[n:])


def read_box(
    entry: Entry, sizes: Sizes, box: Box, open_tensor: Callable[[str], np.ndarray]
) -> np.ndarray:
    """Read a box of a parameter as float32 from tensors; exact for dtypes of up to 32 bits."""
    out = np.empty(extent(box), np.float32)
    for place, _, part in tensors_in(entry, sizes, box, open_tensor):
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


def chunk_shape(entry: Entry, sizes: Sizes, most: int) -> tuple[int, ...]:
    """Return a chunk shape of the parameter that is contiguous in a tensor.

    A chunk consists of rows of the tensor with at most `most` values, or of one row if it has more.
    Its size is 1 in the stacked dimensions.
    """
    dims, chunk = dims_of(entry.letters), dict(sizes)
    for at, dim in enumerate(dims):
        if dim.isdigit():
            continue
        letter, rest = _letter(dim, entry.part), math.prod(shape_of("".join(dims[at + 1 :]), sizes))
        chunk[letter] = min(sizes[letter], max(1, most // rest))
        if rest <= most:
            break
    return (1,) * len(entry.stacked) + shape_of(entry.inner, chunk)
