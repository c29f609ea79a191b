"""Rules about paths: what the file system and the libraries that write there can represent.

Also addresses of runs in object stores, and the folders of their copies on this host.
"""

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from jaxpar.config import Config, ConfigError, replace, value_of
from jaxpar.config.schema.features import paths_of_features

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


def normalized(name: str) -> str:
    """Return a path as its user means it, or an address as it is. Every path enters through this.

    `~` is the home folder; doubled and trailing slashes and "." are left out. ".." is followed as
    the system does, through symbolic links: such a path becomes absolute. Others stay relative, and
    keep the names of links. TensorStore refuses paths that are not normalized.

    What cannot be a path stays as it is, for `check_path`.
    """
    if not name or "\0" in name or _SCHEME.match(name):
        return name
    path = os.path.expanduser(name)
    parts = path.split("/")
    if ".." in parts:
        last = len(parts) - parts[::-1].index("..")
        try:
            path = os.path.join(os.path.realpath("/".join(parts[:last])), *parts[last:])
        except ValueError:  # no valid Unicode
            return name
    return os.path.normpath(path)


def absolute(path: str | Path) -> Path:
    """Return `normalized` of a path, absolute."""
    return Path(os.path.abspath(normalized(str(path))))


def refuse_address(field: str, name: str, fix: str) -> None:
    """Raises:   ConfigError for an address, such as s3://bucket/run, where a path is needed.

    `Path` would take it for a folder named s3: here.
    """
    if scheme := _SCHEME.match(name):
        rule = f"must be a path: {scheme[1]}:// is not supported"
        other = "leave out file://" if scheme[1] == "file" else "a folder where it is mounted"
        raise ConfigError(field, name, rule, f"{fix}, or {other}")


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


# ------------------------------------------------------------------------------ object stores

#: The field with the address of a run.
FIELD = "run.store"

#: The stores that runs can be kept in.
SCHEMES = ("s3", "gs")

_ADDRESS = re.compile(r"(s3|gs)://([a-z0-9][a-z0-9._-]{1,221})(?:/(.*))?", re.DOTALL)

#: One part of a prefix: no pattern, nothing that a path would change.
_PART = re.compile(r"[A-Za-z0-9_=+@,-][A-Za-z0-9._=+@,-]*")

#: Longest prefix, in characters: keys of S3 have at most 1,024 bytes, with the names below it.
MAX_PREFIX = 512


class Address(NamedTuple):
    """The address of a run in an object store, SCHEME://BUCKET/PREFIX."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"


def is_address(text: str) -> bool:
    """Whether a text is meant as an address of an object store that can hold runs."""
    return text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def is_prefix(text: str) -> bool:
    """Whether a text can be the prefix of an address."""
    return all(_PART.fullmatch(part) for part in text.split("/"))


def read_address(field: str, text: str) -> Address:
    """Read the address of a run.

    Raises:   ConfigError that names the field, if it is not s3://BUCKET/PREFIX or
              gs://BUCKET/PREFIX.
    """
    found = _ADDRESS.fullmatch(text)
    prefix = (found[3] or "").rstrip("/") if found else ""
    if found is None or not is_prefix(prefix):
        rule = "must be s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, with a bucket of 3 or more "
        rule += "characters, and of letters, digits and ._=+@,-"
        raise ConfigError(field, text, rule, "use, for example, s3://my-bucket/runs/first")
    if len(prefix) > MAX_PREFIX:
        rule = f"has a prefix of {len(prefix)} characters, more than {MAX_PREFIX}"
        raise ConfigError(field, text, rule, "use a shorter one")
    return Address(found[1], found[2], prefix)


def local_folder(address: Address, place: str) -> Path:
    """Return the folder of a run's copy on this host: its name, and a hash of the address.

    Args:     place: a folder of the cache, such as "runs".
    """
    mark = hashlib.sha256(str(address).encode()).hexdigest()[:12]
    return cache_folder(place) / f"{address.prefix.rpartition('/')[2]}-{mark}"


def cache_folder(place: str) -> Path:
    """Return a folder of the user's cache on this host, such as "runs"."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jaxpar" / place


def check_path_or_address(field: str, name: str, fix: str) -> None:
    """Check a path, or an address, without using it.

    Raises:   ConfigError as `check_path` and `read_address`.
    """
    if is_address(name):
        read_address(field, name)
    else:
        check_path(field, name, fix)


#: Fields that hold a path, or may hold one.
PATH_FIELDS = (
    *("run.dir", "run.init_from"),
    *("data.path", "data.held_out", "data.cache_dir"),
    *paths_of_features(),
)


def with_paths(cfg: Config) -> Config:
    """Return a config that was given by a user, with `normalized` paths."""
    given = {path: value_of(cfg, path) for path in PATH_FIELDS}
    texts = {path: text for path, text in given.items() if isinstance(text, str)}
    changed = {path: new for path, text in texts.items() if (new := normalized(text)) != text}
    return replace(cfg, **changed) if changed else cfg


def with_store(cfg: Config) -> Config:
    """Replace an address in `run.dir` by `run.store`, and a local folder in `run.dir`.

    Raises:   ConfigError as `read_address`, or if `run.store` is another address.
    """
    if not (isinstance(cfg.run.dir, str) and is_address(cfg.run.dir)):
        return cfg
    address = read_address("run.dir", cfg.run.dir)
    if cfg.run.store and cfg.run.store != str(address):
        rule = f"is an address, but run.store is {cfg.run.store}"
        raise ConfigError("run.dir", cfg.run.dir, rule, "use --run.dir FOLDER, or no --run.store")
    folder = str(local_folder(address, "runs"))
    return replace(cfg, **{"run.dir": folder, FIELD: str(address)})
