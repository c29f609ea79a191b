"""Opens files that may be compressed, by the ending of their names."""

import bz2
import gzip
import io
import lzma
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxpar.config import ConfigError
from jaxpar.data.formats.rows import input_error

#: Compressed bytes to read at a time.
READ_BYTES = 1 << 20

#: The compressions by the last ending of a file's name.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".bz2": "bzip2"}

#: What the libraries raise for damaged files.
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, OSError)


def compression(path: Path) -> str:
    """Return the compression of a file, or ""."""
    return COMPRESSIONS.get(path.suffix.lower(), "")


@contextmanager
def decompressed(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """Yield the content of an open file as a stream.

    Raises:   ConfigError, while the content is read, for a file that is damaged or truncated;
              OSError if it cannot be read.
    """
    kind = compression(path)
    if not kind:
        yield file
        return
    try:
        if path.stat().st_size == 0:  # which gzip accepts
            raise EOFError("it has 0 bytes, without even a header")
        with _open(file, kind, path) as stream:
            yield stream
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno:  # of the system, not of a library
            raise
        raise damaged(path, kind, str(error)) from error


def _open(file: BinaryIO, kind: str, path: Path) -> BinaryIO:
    if kind == "zstd":
        # pyarrow, unlike most Zstandard readers, detects a truncated file.
        pyarrow = import_pyarrow(path)
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), kind)
        return cast(BinaryIO, io.BufferedReader(stream, READ_BYTES))
    openers: dict[str, Any] = {"gzip": gzip.open, "xz": lzma.open, "bzip2": bz2.open}
    return cast(BinaryIO, openers[kind](file))


def damaged(path: Path, kind: str, why: str) -> ConfigError:
    """Return the error for a compressed file that a library could not read.

    Args:     kind: a value of COMPRESSIONS. why: what the library said.
    """
    if "too much memory" in why:
        # Only files of `zstd --long=28` or more. pyarrow has no option for them.
        stem, dot, ending = path.name.partition(".")
        again = shlex.quote(str(path.with_name(f"{stem}-again{dot}{ending}")))
        command = f"zstd -dc --long=31 {shlex.quote(str(path))} | zstd -q -o {again}"
        rule = "is compressed with a zstd window above 128 MiB, which cannot be read"
        return input_error(str(path), rule, f"compress it again: {command}")
    rule = f"is not a complete {kind} file ({why})"
    return input_error(str(path), rule, "download or compress it again")


def import_pyarrow(path: Path) -> Any:
    """Import pyarrow, which takes half a second and is an optional package.

    Raises:   ConfigError if it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        fix = "run pip install pyarrow"
        raise input_error(str(path), "needs pyarrow, which is not installed", fix) from error
    return pyarrow
