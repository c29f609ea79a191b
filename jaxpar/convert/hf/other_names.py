"""Reads tensors under the names that transformers has in memory, as those of published files.

transformers 5 packs the experts of a layer into one tensor, and renames and joins others. It undoes
this when it saves a model, but checkpoints in training, and copies of a `state_dict`, keep it.

    experts.gate_up_proj   [E, 2F, D], or transposed [E, D, 2F]: gate, then up
    experts.down_proj      [E, D, F], or transposed [E, F, D]
    experts.up_proj        [E, F, D], of experts without a gate

Each becomes a view of the file under its published name: nothing is copied. A folder of published
names is left as it is.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.convert.hf.config_file import Values
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.folder import Readable
from jaxpar.convert.safetensors_file import STORED

#: By `model_type`: where convolutions of queries, keys and values are one after the other, and the
#: keys of config.json whose product is the width of each.
_WIDTHS = (("linear_num_key_heads", "linear_key_head_dim"),) * 2
CONVOLVED = {
    "olmo_hybrid": (
        "linear_attn",
        (*_WIDTHS, ("linear_num_value_heads", "linear_value_head_dim")),
    ),
    "kimi_linear": ("self_attn", ()),
}

PACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?")


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor, or of several that follow one another in their first dimension."""

    of: tuple[Readable, ...]
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def dtype(self) -> str:
        """Name of the dtype in safetensors."""
        return self.of[0].dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * STORED[self.dtype].itemsize

    def open(self) -> np.ndarray:
        """Open the part: a view of the file, or an array of several."""
        opened = [one.open() for one in self.of]
        part = (opened[0] if len(opened) == 1 else np.concatenate(opened))[self.index]
        return part.T if self.transposed else part


def as_published(
    stored: Mapping[str, Readable], family: Family, values: Values
) -> dict[str, Readable]:
    """Return tensors by their published names.

    Args:     stored: the tensors of a folder. values: config.json, for sizes.
    """
    found: dict[str, Readable] = {}
    for name, tensor in stored.items():
        new = name
        for pattern, replacement in family.renamed.items():
            new = re.sub(pattern, replacement, new)
        found[new if new not in stored else name] = tensor
    found = dict(_convolutions(found, family, values))
    return dict(_experts(found, family, values))


def _convolutions(
    stored: dict[str, Readable], family: Family, values: Values
) -> Iterator[tuple[str, Readable]]:
    """Yield all tensors, with those of convolutions apart."""
    module, keys = CONVOLVED.get(family.model_type, ("", ()))
    for name, tensor in stored.items():
        layer, _, last = name.rpartition(f".{module}.")
        place = f"{layer}.{module}."
        names = [f"{place}{n}_conv1d.weight" for n in "qkv"]
        if not module or last not in ("conv1d.weight", *(f"{n}_conv1d.weight" for n in "qkv")):
            yield name, tensor
            continue
        of = (
            (tensor,) if last == "conv1d.weight" else tuple(stored[n] for n in names if n in stored)
        )
        rows = sum(one.shape[0] if one.shape else 0 for one in of)
        widths = [_product(values, pair) for pair in keys] or [rows // 3] * 3
        wrong = [one.shape[:1] for one in of] != [(width,) for width in widths]
        if sum(widths) != rows or not wrong or len({one.shape[1:] for one in of}) != 1:
            yield name, tensor  # as it is, or neither: an error says so
        elif last in ("conv1d.weight", "q_conv1d.weight"):
            first = 0
            for new, width in zip(names, widths, strict=True):
                index = slice(first, first + width)
                yield new, TensorPart(of, (index,), (width, *of[0].shape[1:]))
                first += width


def _product(values: Values, keys: tuple[str, str]) -> int:
    numbers = [values.get(key) for key in keys]
    return math.prod(n if type(n) is int else 0 for n in numbers)


def _experts(
    stored: dict[str, Readable], family: Family, values: Values
) -> Iterator[tuple[str, Readable]]:
    """Yield all tensors, with those of packed experts apart."""
    named = family.names.of_each_expert.items()
    ends = {weight: name.partition("experts.{E}.")[2] for weight, name in named}
    width = values.get(family.fields["d_model"])
    for name, tensor in stored.items():
        packed = PACKED.fullmatch(name)
        parts = _parts(packed[2], tensor, stored, packed[1], width) if packed and ends else []
        if packed is None or not parts:
            yield name, tensor
            continue
        for e in range(tensor.shape[0]):
            for which, rows, transposed in parts:
                inner = (slice(None), rows) if transposed else (rows, slice(None))
                sizes = zip(inner, tensor.shape[1:], strict=True)
                shape = tuple(len(range(size)[part]) for part, size in sizes)
                shape = shape[::-1] if transposed else shape
                part = TensorPart((tensor,), (e, *inner), shape, transposed)
                yield f"{packed[1]}{e}.{ends[which]}", part


def _parts(
    kind: str, tensor: Readable, stored: Mapping[str, Readable], place: str, width: Any
) -> list[tuple[str, slice, bool]]:
    """Return what a tensor of experts has: a parameter, its rows, and whether it is transposed."""
    whole = slice(None)
    if len(tensor.shape) != 3 or min(tensor.shape) < 1 or type(width) is not int:
        return []
    _, rows, columns = tensor.shape
    # The dimension of the model comes last in a matrix that reads it, and first in `down_proj`.
    if (rows == width) == (columns == width):
        others = {n: stored.get(place + n) for n in ("gate_up_proj", "up_proj", "down_proj")}
        transposed = any(
            other is not None and len(other.shape) == 3 and other.shape[1] != other.shape[2]
            and (other.shape[1] == width) is (n != "down_proj")
            for n, other in others.items()
        )  # fmt: skip
    else:
        transposed = (columns if kind == "down_proj" else rows) == width
    if kind == "gate_up_proj":
        both = rows if not transposed else columns
        half = both // 2
        if both % 2:
            return []
        return [("w_gate", slice(0, half), transposed), ("w_up", slice(half, both), transposed)]
    named = {"gate_proj": "w_gate", "up_proj": "w_up", "down_proj": "w_down"}[kind]
    return [(named, whole, transposed)]
