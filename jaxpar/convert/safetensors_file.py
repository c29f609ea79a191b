"""The safetensors format: a JSON header, then the values. Files are read and written memory-mapped.

    8 bytes   length of the header, little-endian
    header    {"name": {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}, ...}
    the rest  row-major values, little-endian, without holes

The header is first checked against the length of the file, so a truncated download is detected
before any value is read. Only the pages in use are in memory, and a map is closed as soon as its
part is done, so memory does not depend on the size of the file.

Source:   https://huggingface.co/docs/safetensors, section "Format".
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import read_json_object

#: The supported dtypes, by their names in the format.
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

#: The dtypes of tensors in a file: DTYPES, and those of quantized weights (`hf/mxfp4.py`,
#: `hf/float8_blocks.py`).
STORED = DTYPES | {"U8": np.dtype("u1"), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}

#: The names of dtypes in the format, by their names in JAX.
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

#: Maximum size of a header, less than the format's limit of 100 MB. The header of a tensor takes
#: about 100 bytes.
MAX_HEADER_BYTES = 32 << 20

AGAIN = "download the file again"


@dataclass(frozen=True)
class Stored:
    """The location of a tensor in a file."""

    file: Path
    dtype: str
    """Its name in the format: "BF16"."""
    shape: tuple[int, ...]
    offset: int
    """Position of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * STORED[self.dtype].itemsize

    def open(self, mode: Any = "r") -> np.ndarray:
        """Open the tensor as a memory map; mode "r+" to write."""
        dtype = STORED[self.dtype]
        return np.memmap(self.file, dtype, mode, self.offset, self.shape)


def read_header(file: Path) -> dict[str, Stored]:
    """Read the locations of all tensors in a file.

    Raises:   ConfigError that names the file when it is truncated or not a safetensors file, or the
              tensor when its dtype is not one of STORED.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            rule = "is not a safetensors file, or is truncated"
            raise ConfigError(file.name, f"{size} bytes", rule, AGAIN)
        text = opened.read(length)
    try:
        header = read_json_object(text, what="the header", max_bytes=MAX_HEADER_BYTES)
        header.pop("__metadata__", None)
        found = {name: _stored(file, name, about, 8 + length) for name, about in header.items()}
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"has a damaged header ({error!r})"
        raise ConfigError(file.name, f"{size} bytes", rule, AGAIN) from error
    _check_extent(file, size, 8 + length, list(found.values()))
    return found


def _stored(file: Path, name: str, about: dict[str, Any], first: int) -> Stored:
    (begin, end), shape = about["data_offsets"], about["shape"]
    if not isinstance(shape, list) or not all(type(n) is int for n in (begin, end, *shape)):
        raise TypeError(f"{name} has sizes that are not integers")
    if about["dtype"] not in [*STORED]:
        rule = f"of {file.name} must be one of {', '.join(DTYPES)}"
        fix = "use the weights as published, not a quantized copy"
        raise ConfigError(name, about["dtype"], rule, fix)
    stored = Stored(file, about["dtype"], tuple(shape), first + begin)
    if stored.num_bytes != end - begin or begin < 0 or min(stored.shape, default=0) < 0:
        raise ValueError(f"{name} has {end - begin} bytes for shape {list(stored.shape)}")
    return stored


def _check_extent(file: Path, size: int, first: int, tensors: list[Stored]) -> None:
    """Check that tensors are contiguous from the header to the end of the file."""
    at = first
    for stored in sorted(tensors, key=lambda s: (s.offset, s.num_bytes)):
        if stored.offset != at:
            raise ConfigError(file.name, f"{size} bytes", "has a hole or an overlap", AGAIN)
        at += stored.num_bytes
    if at != size:
        rule = f"must be {at} bytes long according to its header: it is truncated or damaged"
        raise ConfigError(file.name, f"{size} bytes", rule, AGAIN)


def create_file(
    file: Path, shapes: dict[str, tuple[int, ...]], dtype: str | Mapping[str, str]
) -> dict[str, Stored]:
    """Create a file with a header and space for tensors, to be filled by `Stored.open("r+")`.

    Args:     dtype: one of NAMES, of all tensors or by name.
    Returns:  the location of each tensor.
    """
    begin = 0
    # Older versions of `transformers` refuse a file without this metadata.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        name_of = NAMES[dtype if isinstance(dtype, str) else dtype[name]]
        end = begin + math.prod(shape) * DTYPES[name_of].itemsize
        header[name] = {"dtype": name_of, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + begin)
    return {name: _stored(file, name, header[name], 8 + len(text)) for name in shapes}
