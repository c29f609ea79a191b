"""Tar files of tokens, as WebDataset writes them: a row for each sample."""

import gzip
import io
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.config.json_reader import read_json
from jaxpar.data.formats.compressed import MAX_LINE_BYTES
from jaxpar.data.formats.rows import RowReader, as_tokens, broken, open_rows
from jaxpar.data.formats.token_file import Hints, TokenFile

#: The members that hold a sample's tokens: an array, or a list of integers.
ENDINGS = (".npy", ".json", ".json.gz")

#: Bytes of the members of a block, together.
BLOCK_BYTES = 16 << 20


class _Member(NamedTuple):
    name: str
    start: int
    size: int


class TarRows(RowReader):
    """The samples of an uncompressed tar file."""

    def __init__(self, path: Path):
        """Raises:   ConfigError for a damaged file, or one without tokens."""
        self.path = path
        self._blocks: list[list[_Member]] = [[]]
        others: set[str] = set()
        try:
            with tarfile.open(path, "r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # memory would grow
                    if not member.isreg():
                        continue
                    if not member.name.lower().endswith(ENDINGS):
                        others.add(Path(member.name).suffix)
                        continue
                    if sum(one.size for one in self._blocks[-1]) > BLOCK_BYTES:
                        self._blocks.append([])
                    found = _Member(member.name, member.offset_data, member.size)
                    self._blocks[-1].append(found)
                end = archive.offset
        except tarfile.TarError as error:
            raise broken(path, f"is not a complete tar file ({error})") from error
        with path.open("rb") as file:
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise broken(path, f"has neither a member nor its end at byte {end:,}")
        if not self._blocks[0]:
            rule = f"has no {', '.join(ENDINGS)}, only {', '.join(sorted(others)) or 'nothing'}"
            raise broken(path, rule, "use a tar file of tokens, or prepare its text")
        self.num_blocks = len(self._blocks)

    def read(self, block: int) -> list[np.ndarray]:
        """Return the rows of a block."""
        with self.path.open("rb") as file:
            rows = []
            for name, start, size in self._blocks[block]:
                where = f"{self.path}, {name}"
                if size > MAX_LINE_BYTES:
                    raise broken(where, f"has more than {MAX_LINE_BYTES:,} bytes", "split it")
                file.seek(start)
                data = file.read(size)
                try:
                    row = _row(name.lower(), data)
                except Exception as error:  # NumPy's are of several kinds
                    why = " ".join(str(error).split())[:200]
                    raise broken(where, f"cannot be read ({why})") from error
                rows.append(as_tokens(row, where))
        return rows


def _row(name: str, data: bytes) -> object:
    if name.endswith(".npy"):
        return np.load(io.BytesIO(data), allow_pickle=False)
    if name.endswith(".gz"):
        with gzip.open(io.BytesIO(data)) as opened:
            data = opened.read(MAX_LINE_BYTES + 1)
    return read_json(data, max_bytes=MAX_LINE_BYTES)


def find(path: Path) -> Path | None:
    """Return a path if it is a tar file whose first file has tokens; None otherwise."""
    if path.suffix != ".tar" or not path.is_file():
        return None
    try:
        with tarfile.open(path, "r:") as archive:
            first = next((member for member in archive if member.isreg()), None)
            if first is None or not first.name.lower().endswith(ENDINGS):
                return None
            opened = archive.extractfile(first)
            assert opened is not None  # a regular file
            data = opened.read(min(first.size, MAX_LINE_BYTES))
    except tarfile.TarError as error:
        raise broken(path, f"is not a complete tar file ({error})") from error
    try:
        return path if isinstance(_row(first.name.lower(), data), list | np.ndarray) else None
    except Exception:  # NumPy's are of several kinds
        return None


def read(path: Path, hints: Hints) -> TokenFile | None:
    """Open a tar file. None: it has no tokens. Raises:   ConfigError."""
    return open_rows(TarRows(path), cached=True)
