"""A checkpoint in PyTorch's distributed format, as Megatron-LM saves it (`torch_dist`).

    latest_checkpointed_iteration.txt   the step, beside the folders of all steps
    iter_0000100/.metadata              a pickle: name, dtype, shape and pieces of every tensor
    iter_0000100/__0_0.distcp           the pieces that a process wrote, each as of `torch.save`
    iter_0000100/common.pt              before megatron-core 0.19: all that is not a tensor

Source:   torch/distributed/checkpoint/metadata.py and filesystem.py of PyTorch 2.13,
          megatron/core/dist_checkpointing of megatron-core 0.19.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.convert.megatron.torch_zip import (
    MAX_BYTES,
    Built,
    Span,
    UnreadablePickle,
    open_tensor,
    read_object,
    read_pickle,
)
from jaxpar.convert.safetensors_file import DTYPES
from jaxpar.sharding.grid import Box, extent, intersection, volume, within

LATEST_FILE, METADATA_FILE = "latest_checkpointed_iteration.txt", ".metadata"
COMMON_FILE, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"

AGAIN = "save the checkpoint again, with --ckpt-format torch_dist"

_CLASSES = "torch.distributed.checkpoint.metadata."

#: How names in the metadata begin. It also holds the plans for saving, which are not used.
ALLOWED = (
    *("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing."),
    *("torch.Size", "torch.serialization._get_layout", "torch.float", "torch.bfloat16"),
    *("torch.int", "torch.uint", "torch.bool", "torch.complex"),
    *("collections.OrderedDict", "pathlib.PosixPath", "pathlib._local.PosixPath"),
)

#: Names in the format of safetensors, by PyTorch's dtypes.
_CODES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor, and where it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    span: Span


@dataclass(frozen=True)
class Sharded:
    """A tensor in pieces."""

    name: str
    dtype: str
    """Its name in safetensors; another if jaxpar does not read it."""
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    def read(self, box: Box) -> np.ndarray:
        """Read a box. A box that is in one piece is a memory map.

        Raises:   ConfigError that names the tensor and the file of a damaged piece.
        """
        shape = extent(box)
        out, filled = None, 0
        for piece, here, there in self._in(box):
            part = _open(self, piece)[there]
            if part.shape == shape:
                return part
            out = np.zeros(shape, DTYPES[self.dtype]) if out is None else out
            out[here] = part
            filled += part.size
        if out is None or filled != out.size:
            raise ConfigError(self.name, list(self.shape), "has pieces missing or twice", AGAIN)
        return out

    def _in(self, box: Box) -> Iterator[tuple[TensorPiece, Box, Box]]:
        """Yield the pieces of a box: the part in the box, and the part in the piece."""
        for piece in self.pieces:
            dims = zip(piece.offsets, piece.shape, strict=True)
            whole = tuple(slice(at, at + n) for at, n in dims)
            common = intersection(box, whole)
            if volume(common):
                yield piece, within(common, box), within(common, whole)


def _open(tensor: Sharded, piece: TensorPiece) -> np.ndarray:
    return reading(piece.span.file, lambda: open_tensor(piece.span, piece.shape, tensor.dtype))


def reading[T](file: Path, read: Callable[[], T]) -> T:
    """Call `read`. Raises:   ConfigError that names the file when it cannot be read."""
    try:
        return read()
    except (UnreadablePickle, OSError) as error:
        raise ConfigError("DIR", str(file), f"cannot be read: it {error}", AGAIN) from error


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its tensors by name, and what else it holds."""

    folder: Path
    tensors: dict[str, Sharded]
    objects: dict[str, Span]

    def common(self) -> Any:
        """Return what is not a tensor, as a tree; None if the checkpoint has nothing else."""
        file = self.folder / COMMON_FILE
        span = self.objects.get(COMMON_OBJECT)
        if span is None and file.is_file():
            span = Span(file, 0, file.stat().st_size)
        return span and reading(span.file, lambda: read_object(span))


def find_folder(folder: Path) -> Path:
    """Return the folder of the latest step, or the folder itself if it is one of a step.

    Raises:   ConfigError if there is no checkpoint of the format.
    """
    latest = folder / LATEST_FILE
    if latest.is_file():
        text = latest.read_bytes()[:32].decode("utf-8", "replace").strip()
        name = f"iter_{int(text):07d}" if text.isascii() and text.isdecimal() else text
        if name not in (path.name for path in folder.iterdir()):
            rule = f"names the step {text!r}, which is not in the folder"
            raise ConfigError("DIR", str(latest), rule, "use the folder of a step: DIR/iter_...")
        folder = folder / name
    if not (folder / METADATA_FILE).is_file():
        rule = f"has no {METADATA_FILE}" if folder.is_dir() else "is not a folder"
        fix = "use a checkpoint that Megatron-LM saved with --ckpt-format torch_dist"
        raise ConfigError("DIR", str(folder), rule, fix)
    return folder


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read what a checkpoint consists of. No tensor is read.

    Raises:   ConfigError that names the file and what is wrong with it.
    """
    folder = find_folder(folder)
    file = folder / METADATA_FILE
    if file.stat().st_size > MAX_BYTES:
        raise ConfigError("DIR", str(file), f"has more than {MAX_BYTES} bytes", AGAIN)
    tree = reading(file, lambda: read_pickle(file.read_bytes(), ALLOWED))
    try:
        return _checkpoint(folder, tree)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        rule = f"does not describe a checkpoint ({error!r})"
        raise ConfigError("DIR", str(file), rule, AGAIN) from error


def _checkpoint(folder: Path, tree: Built) -> Checkpoint:
    if tree.of.name != _CLASSES + "Metadata":
        raise TypeError(tree.of.name)
    fields = tree.fields()
    file_sizes: dict[str, int] = {}
    where: dict[tuple[str, tuple[int, ...] | None], Span] = {}
    for key, value in fields["storage_data"].pairs:
        index = key.fields()
        if not isinstance(index["fqn"], str):
            raise TypeError("a tensor without a name")
        offset = index.get("offset")
        place = None if offset is None else _sizes(offset)
        where[index["fqn"], place] = _span(folder, value.fields(), file_sizes)
    tensors, objects = {}, {}
    for name, about in fields["state_dict_metadata"].by_name().items():
        if about.of.name == _CLASSES + "TensorStorageMetadata":
            tensors[name] = _sharded(name, about.fields(), where)
        elif (name, None) in where:
            objects[name] = where[name, None]
    return Checkpoint(folder, tensors, objects)


def _sharded(name: str, about: dict[str, Any], where: dict) -> Sharded:
    shape = _sizes(about["size"])
    dtype = about["properties"].state[0].name
    pieces = []
    for chunk in about["chunks"]:
        fields = chunk.fields()
        offsets, sizes = _sizes(fields["offsets"]), _sizes(fields["sizes"])
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"{name} has pieces of another rank")
        if any(at + n > most for at, n, most in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{name} has a piece outside")
        span = where[name, offsets]
        if math.prod(sizes) > span.length:
            raise ValueError(f"{name} has a piece of more values than bytes")
        pieces.append(TensorPiece(offsets, sizes, span))
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        raise ValueError(f"{name} has pieces missing or twice")
    return Sharded(name, _CODES.get(dtype, dtype), shape, tuple(pieces))


def _sizes(size: Built) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    if size.of.name != "torch.Size":
        raise TypeError(size.of.name)
    (numbers,) = size.args
    if any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("a size that is not a number")
    return tuple(numbers)


def _span(folder: Path, about: dict[str, Any], sizes: dict[str, int]) -> Span:
    name, offset, length = (about[key] for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".distcp"):
        raise ValueError(f"a file outside of the folder: {name!r}")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise ValueError(f"a place in {name} that is not a number")
    if about.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed or encrypted")
    if name not in sizes:
        sizes[name] = (folder / name).stat().st_size if (folder / name).is_file() else 0
    if offset + length > sizes[name]:
        raise ValueError(f"{name} is missing or truncated")
    return Span(folder / name, offset, length)
