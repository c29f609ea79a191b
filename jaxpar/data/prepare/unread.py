"""What to do about files that `prepare` does not read."""

import codecs
import itertools
import json
import shlex
from pathlib import Path

from jaxpar.data.formats.compressed import COMPRESSIONS, decompressed

#: Bytes of a file to look at.
LOOKED_AT = 1 << 16

#: Endings of text that is a table, a page or an archive: as raw text, a model would learn its
#: syntax.
CONVERTED = (".csv", ".tsv", ".xml", ".html", ".htm", ".pdf", ".zip", ".tar", ".parquet", ".arrow")


def is_text(path: Path) -> bool:
    """Return whether the option --extension reads a file as text that is worth it."""
    ending = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if ending in COMPRESSIONS else ending
    begin = _begin(path)
    return bool(
        ending and inner not in CONVERTED and begin and not _is_json(begin) and _is_utf8(begin)
    )


def advice(path: Path, kinds: str, has_extension: bool) -> str:
    """Return how to read a file whose name does not say what it is.

    Args:     kinds: the endings that can be read. has_extension: whether the command has the option
              --extension.
    """
    name, begin = path.name, _begin(path)
    compressed = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    stem = name.removesuffix(path.suffix)
    if name.lower().endswith((".tar" + compressed, ".tgz")) and name.lower() != ".tar":
        return "decompress it first: a tar file is read uncompressed"
    if begin is not None and _is_json(begin):
        new = path.with_name(f"{stem}.jsonl{compressed}")
        return f"rename it: mv {shlex.quote(str(path))} {shlex.quote(str(new))}"
    if has_extension and is_text(path):
        return f"convert it to one of {kinds}, or read it as text with --extension {path.suffix}"
    return f"convert it to one of {kinds}"


def _begin(path: Path) -> bytes | None:
    """Return the first bytes of a file, decompressed; None if they cannot be read."""
    try:
        with path.open("rb") as file, decompressed(file, path) as content:
            return content.read(LOOKED_AT)
    except (OSError, ValueError):
        return None


def _is_utf8(begin: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(begin, final=False)
    except UnicodeDecodeError:
        return False
    return "\0" not in text


def _is_json(begin: bytes) -> bool:
    """Return whether a file begins as JSON: an object or array in a line, or an indented one."""
    lines = (line.strip() for line in begin.splitlines())
    first, second = itertools.islice((*[line for line in lines if line][:2], b"", b""), 2)
    if first in (b"{", b"[", b"[{"):
        return second[:1] in (b'"', b"{", b"[", b"")
    if first[:1] not in (b"{", b"["):
        return False
    try:
        json.loads(first)
    except RecursionError:
        return True
    except ValueError:
        return len(first) >= LOOKED_AT - 1  # a line that is longer
    return True
