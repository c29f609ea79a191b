"""Writes a dataset to a store: complete or absent, with the digests of the parts of its tokens."""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import cache_folder, read_address
from jaxpar.data.formats.meta import DATASET_FILES, META_FILE, STREAM_FILE
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files import atomic
from jaxpar.stores.cache import DIGEST_BYTES, PART_BYTES, digests_of
from jaxpar.stores.folders import FILES, InUse, upload_folder
from jaxpar.stores.objects import Missing, Objects

#: Ends the name of the object with the digests of the parts of another: its SHA-256 as bytes, then
#: the digests.
PARTS = ".parts"

#: Bytes of a SHA-256.
HEAD_BYTES = 32


@contextmanager
def whole_address(output: str, overwrite: bool) -> Iterator[Path]:
    """Yield a folder that is uploaded to an address if the block succeeds, and then deleted.

    Args:     overwrite: replace an existing dataset. Other objects are never replaced.
    Raises:   ConfigError("--output", ...) if the address has other objects, or cannot be used;
              StoreError.
    """
    address = read_address("--output", output)
    objects = Objects(address, "--output")
    _check_address(objects, output, overwrite)
    above = cache_folder("preparing")
    staging = above / hashlib.sha256(str(address).encode()).hexdigest()[:16]
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        rule = f"is written in {staging} first, which cannot be created: {error.strerror}"
        fix = "set XDG_CACHE_HOME to another folder"
        raise ConfigError("--output", output, rule, fix) from error
    try:
        yield staging
        if (staging / STREAM_FILE).exists():
            rule = "cannot be an address with --stream: training reads the text from this host"
            raise ConfigError("--output", output, rule, "leave out --stream")
        for file in sorted(staging.glob("*.bin")):
            with open(file, "rb") as opened:
                head = hashlib.file_digest(opened, "sha256").digest()
            (staging / (file.name + PARTS)).write_bytes(head + digests_of(file))
        upload_folder(objects, staging, META_FILE, overwrite)
    except InUse:
        raise _in_use(output) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_address(objects: Objects, output: str, overwrite: bool) -> None:
    held = [found.name for found in objects.names(exact=True)]
    ours = {*DATASET_FILES, *(name + PARTS for name in DATASET_FILES), FILES}
    if foreign := [name for name in held if name not in ours]:
        rule = f"contains {foreign[0]!r}, which is not part of a dataset"
        raise ConfigError("--output", output, rule, "use a new or empty prefix")
    if META_FILE in held and not overwrite:
        raise _in_use(output)


def _in_use(output: str) -> ConfigError:
    fix = "add --overwrite to replace it, or use another address"
    return ConfigError("--output", output, "already has a dataset", fix)


def read_parts(objects: Objects, name: str, size: int, sha256: str) -> bytes:
    """Return the digests of the parts of an object; empty if they were not written.

    Args:     name: of the object with the digests. size, sha256: of the other one.
    Raises:   RunError if they are those of another object; StoreError.
    """
    try:
        content, _ = objects.read(name)
    except Missing:
        return b""
    if not _are_parts(content, size, sha256):
        rule = f"has the digests of another file than {name.removesuffix(PARTS)}"
        fix = f"prepare the dataset again, or delete {name}"
        raise RunError(f"{objects.address}/{name} {rule}. Fix: {fix}")
    return content[HEAD_BYTES:]


def _are_parts(content: bytes, size: int, sha256: str) -> bool:
    expected = HEAD_BYTES + -(-size // PART_BYTES) * DIGEST_BYTES
    return len(content) == expected and content[:HEAD_BYTES].hex() == sha256


def kept_parts(file: Path, size: int, sha256: str) -> bytes:
    """Return the digests that `keep_parts` has kept; empty if there are none of this content."""
    try:
        content = file.read_bytes()
    except OSError:
        return b""
    return content[HEAD_BYTES:] if _are_parts(content, size, sha256) else b""


def keep_parts(file: Path, sha256: str, digests: bytes) -> None:
    """Keep the digests of what was verified on this host; do nothing if it cannot be written."""
    with contextlib.suppress(OSError):
        atomic.write(file, bytes.fromhex(sha256) + digests)
