"""`.npy` files of tokens: NumPy's, with a header, and OLMo-core's, which are bare numbers.

Source:   `docs/source/guides/data_loading.rst` of OLMo-core; the Dolma toolkit writes them.
"""

from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.arrays import FileArray
from jaxpar.data.formats.token_file import Hints, TokenFile, tokens_of

MAGIC = b"\x93NUMPY"


def find(path: Path) -> Path | None:
    """Return a path if it is an .npy file, and not an index of a dataset; None otherwise."""
    ours = path.name.endswith(".documents.npy")
    return path if path.suffix == ".npy" and path.is_file() and not ours else None


def find_numpy(path: Path) -> Path | None:
    """Return a path if it is an .npy file with a header; None otherwise."""
    if find(path) is None:
        return None
    with path.open("rb") as file:
        return path if file.read(len(MAGIC)) == MAGIC else None


def read_numpy(path: Path, hints: Hints) -> TokenFile:
    """Open an .npy file with a header. An array of several dimensions is read row by row.

    Raises:   ConfigError("data.path", ...) for a damaged file, or another array.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        assert isinstance(array, np.memmap)
    except Exception as error:  # for a damaged header, NumPy raises errors of several kinds
        if isinstance(error, OSError) and error.errno:
            raise
        why = " ".join(str(error).split())[:200]
        raise _broken(path, f"is not a complete .npy file ({why})") from error
    if array.dtype.kind not in "ui" or not array.size or not array.flags.c_contiguous:
        rule = f"has {array.dtype} {list(array.shape)}, not integers in the order of the text"
        raise _broken(path, rule, "write the tokens as an array of integers")
    return TokenFile(path, FileArray(path, array.dtype, array.size, array.offset), None)


def read_bare(path: Path, hints: Hints) -> TokenFile:
    """Open a file of bare numbers.

    Raises:   ConfigError("data.path", ...) for a dtype that is not known, or does not fit.
    """
    size = path.stat().st_size
    if size == 0:
        raise _broken(path, "is empty")
    dtype = hints.dtype_of(path)
    if size % dtype.itemsize:
        rule = f"has {size:,} bytes, no multiple of the {dtype.itemsize} of {dtype.name}"
        raise _broken(path, rule, "set the dtype with --data.token-dtype, or copy the file again")
    return TokenFile(path, tokens_of(path, dtype), None, guessed=True)


def _broken(path: Path, rule: str, fix: str = "copy the file again") -> ConfigError:
    return ConfigError("data.path", str(path), rule, fix)
