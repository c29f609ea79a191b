"""Rules about paths: what the file system and the libraries that write there can represent."""

import os
import re
import sys

from jaxpar.config import ConfigError

#: What a path to an object store or a web page begins with; `Path` drops the second slash.
_SCHEME = re.compile("([A-Za-z][A-Za-z0-9+.-]*):/")

#: Characters with which Orbax 0.11 and TensorStore write to, or search, another folder.
_PATTERNS = "\\*?[]"


def check_path(field: str, name: str, fix: str) -> None:
    """Check a path without using it.

    Args:     field: the field or option that holds it. fix: of the error.
    Raises:   ConfigError for a path of another system (gs://...), a path that the encoding of file
              names cannot represent, one that is too long, or one with a null byte.
    """
    refuse_address(field, name, fix)
    if not _is_encodable(name):
        encoding = sys.getfilesystemencoding()
        rule = f"must be a path in UTF-8 that the encoding of file names, {encoding}, represents"
        raise ConfigError(field, name, rule, f"{fix}; with another locale, set PYTHONUTF8=1")
    raw = os.fsencode(name)
    if len(raw) >= 4096 or max(map(len, raw.split(b"/"))) >= 256 or b"\0" in raw:
        rule = "must be a path of at most 4,095 bytes, 255 per name, without a null byte"
        raise ConfigError(field, name, rule, fix)


def refuse_address(field: str, name: str, fix: str) -> None:
    """Raises:   ConfigError for an address, such as s3://bucket/run, where a path is needed.

    `Path` would take it for a folder named s3: here.
    """
    if scheme := _SCHEME.match(name):
        rule = f"must be a path: {scheme[1]}:// is not supported"
        raise ConfigError(field, name, rule, f"{fix}, or a folder where it is mounted")


def check_run_folder(field: str, name: str, fix: str) -> None:
    """Check the path of a folder in which checkpoints are written, after `check_path`.

    Raises:   ConfigError for characters that Orbax takes for patterns: it would leave out arrays.
              Also for the current folder, if the path is relative to it.
    """
    for path, where in (
        (name, ""),
        (os.path.abspath(name), ", a part of the current folder's path"),
    ):
        fix = "use an absolute path, or start in another folder" if where else fix
        wrong = " or ".join(sorted(set(path) & set(_PATTERNS)))
        if wrong:
            rule = f"cannot hold checkpoints with {wrong} in its path{where}"
            raise ConfigError(field, name, rule, fix)
        if not _is_encodable(path):
            raise ConfigError(field, name, f"cannot hold checkpoints: {path!r} is not UTF-8", fix)


def _is_encodable(path: str) -> bool:
    """Whether a path is valid Unicode, and valid in the encoding of file names.

    Python holds bytes of a name that it cannot decode as lone surrogates. Orbax and TensorStore
    refuse them, at the first save.
    """
    try:
        path.encode("utf-8")
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True
