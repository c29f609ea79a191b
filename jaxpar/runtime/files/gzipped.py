"""Reads whole files that may be compressed, up to a limit of bytes."""

import gzip
import zlib
from pathlib import Path


class NotReadable(ValueError):
    """A file is too large, or its compression is damaged. The message does not name the file."""


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a file, and decompress it if its name ends in .gz.

    A small compressed file can contain gigabytes: never more than max_bytes are decompressed.

    Raises:   NotReadable for more than max_bytes, or a damaged or truncated .gz file; OSError.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise NotReadable(str(error)) from error
    if len(data) > max_bytes:
        raise NotReadable(f"it has more than {max_bytes:,} bytes")
    return data
