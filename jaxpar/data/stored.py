"""Datasets in a store: the copy of the small files on this host, tokens by parts, writing one."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxpar.config import Config, ConfigError
from jaxpar.config.json_reader import read_json
from jaxpar.config.rules.paths import Address, absolute, cache_folder, read_address
from jaxpar.data.formats.arrays import WindowedArray
from jaxpar.data.formats.meta import (
    COUNTS_FILE,
    META_FILE,
    PART_FILE,
    PLAN_FILE,
    PREPARE,
    SENT_FILE,
    STREAM_FILE,
    documents_file,
    is_dataset_file,
    read_meta,
)
from jaxpar.data.formats.tokens import STORED
from jaxpar.runtime import progress as units
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files import atomic
from jaxpar.runtime.processes.peers import log
from jaxpar.stores.cache import (
    AFTER,
    PART_BYTES,
    SUM_BYTES,
    CachedObject,
    PartCache,
    checksums_of,
    num_blocks,
)
from jaxpar.stores.folders import FILES, InUse, update_copy, upload_folder
from jaxpar.stores.objects import Content, Objects, Stamp, content_of

# ----------------------------------------------------- Numbers in an object of a store, as an array


class StoredArray(WindowedArray):
    """Integers [N] of an object. A slice is an array, and is read when it is asked for."""

    def __init__(self, stored: CachedObject, dtype: np.dtype):
        self.stored, self.dtype = stored, dtype
        self._length = stored.size // dtype.itemsize

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length].

        Args:     starts: int64 [N]; start + length is at most the length of the array.
        Raises:   ObjectDamaged, StoreError.
        """
        return self.begin(starts, length)()

    def begin(self, starts: np.ndarray, length: int) -> Callable[[], np.ndarray]:
        """As `WindowedArray.begin`."""
        firsts = np.asarray(starts, np.int64) * self.dtype.itemsize
        lasts = firsts + length * self.dtype.itemsize
        wait = self.stored.begin(list(zip(firsts.tolist(), lasts.tolist(), strict=True)))
        return lambda: np.frombuffer(b"".join(wait()), self.dtype).reshape(len(firsts), length)

    def place(self, token: int) -> str:
        """Return the place of a token, for an error."""
        return f"token {token:,} of {self.stored.place} (byte {token * self.dtype.itemsize:,})"


# -------------- Writes a dataset to a store: complete or absent, with the checksums of its tokens


#: Ends the name of the object with the checksums of another: its SHA-256 as bytes, then those of
#: its blocks.
CHECKSUMS = ".checksums"

#: Bytes of a SHA-256.
HEAD_BYTES = 32


@contextmanager
def whole_address(output: str, overwrite: bool, task: int | None = None) -> Iterator[Path]:
    """Yield a folder that is uploaded to an address if the block succeeds, and then deleted.

    It is not if it has no meta.json: other processes write missing parts.

    Args:     overwrite: replace an existing dataset. Other objects are never replaced. task: number
              of this process, if several on this host write to the address.
    Raises:   ConfigError("--output", ...) if the address has other objects, or cannot be used;
              StoreError.
    """
    address = read_address("--output", output)
    objects = Objects(address, "--output")
    _check_address(objects, output, overwrite)
    above = cache_folder("preparing")
    staging = above / hashlib.sha256(f"{address}{task}".encode()).hexdigest()[:16]
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
        if not (staging / META_FILE).exists():
            return
        for file in sorted(staging.rglob("*.bin")):
            write_checksums(file)
        sent: dict[str, Content] = {}
        for file in sorted(staging.glob(f"*/{SENT_FILE}")):
            sent |= content_of(read_json(file))
        upload_folder(objects, staging, META_FILE, overwrite, sent)
    except InUse:
        if objects.read(META_FILE)[0] != (staging / META_FILE).read_bytes():
            raise _in_use(output) from None  # otherwise, another task has written the same
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def send_part(folder: Path, output: str, replace: bool = False) -> None:
    """Upload a part of a dataset for an address, part.json last; its large files are deleted here,
    so that this host needs no space for all parts.

    Args:     replace: a dataset at the address, which is one no more. Raises:   StoreError.
    """
    objects = Objects(read_address("--output", output), "--output")
    if replace:
        objects.delete([META_FILE])
    large = sorted([*folder.glob("*.bin"), *folder.glob("*.documents.npy")])
    for file in sorted(folder.glob("*.bin")):
        large.append(write_checksums(file))
    small = [file for file in (folder / COUNTS_FILE,) if file.exists()]
    sent = {f"{folder.name}/{one.name}": one for one in (*large, *small)}
    listed = {name: objects.upload(name, file)._asdict() for name, file in sent.items()}
    (folder / SENT_FILE).write_text(json.dumps(listed))
    for name in (SENT_FILE, PART_FILE):
        if (folder / name).exists():
            objects.upload(f"{folder.name}/{name}", folder / name)
    for file in large:
        file.unlink()


def _check_address(objects: Objects, output: str, overwrite: bool) -> None:
    held = [found.name for found in objects.names(exact=True)]
    ours = [n for n in held if n == FILES or is_dataset_file(n.removesuffix(CHECKSUMS))]
    if foreign := sorted(set(held) - set(ours)):
        rule = f"contains {foreign[0]!r}, which is not part of a dataset"
        raise ConfigError("--output", output, rule, "use a new or empty prefix")
    if META_FILE in held and not overwrite:
        raise _in_use(output)


def _in_use(output: str) -> ConfigError:
    fix = "add --overwrite to replace it, or use another address"
    return ConfigError("--output", output, "already has a dataset", fix)


def write_checksums(file: Path) -> Path:
    """Write the checksums of a file next to it. Returns:  their file."""
    whole, sums = hashlib.sha256(), []
    with open(file, "rb") as opened:
        while content := opened.read(PART_BYTES):
            whole.update(content)
            sums.append(checksums_of(content))
    written = file.with_name(file.name + CHECKSUMS)
    written.write_bytes(whole.digest() + b"".join(sums))
    return written


def _checksums_in(
    read: Callable[[int, int], bytes], what: str, sha256: str
) -> Callable[[int, int], bytes]:
    """Return what returns the checksums of a range of blocks.

    Args:     read: returns bytes of their file, first to last. what: names it. sha256: of the
              tokens.
    """

    @functools.cache
    def check() -> None:
        if read(0, HEAD_BYTES).hex() != sha256:
            rule = f"has the checksums of another file than {what.removesuffix(CHECKSUMS)}"
            raise RunError(f"{what} {rule}. Fix: prepare the dataset again, or delete it")

    def checksums(first: int, last: int) -> bytes:
        check()
        return read(HEAD_BYTES + first * SUM_BYTES, HEAD_BYTES + last * SUM_BYTES)

    return checksums


# ---- The copy of a dataset in a store: its small files, on this host. Its tokens stay in the store


def _stays(name: str) -> bool:
    """Return whether a file stays in the store."""
    return name.endswith((".bin", COUNTS_FILE, PART_FILE, SENT_FILE, PLAN_FILE))


#: Bytes of a file that is read once at a start, if nothing else tells whether it is intact.
CHECKED_BYTES = 64 << 30

#: Says what to do about a larger one.
NOT_VERIFIED = "Write the dataset with `prepare --output ADDRESS`, which adds it"


class StoredFolder:
    """A dataset of a store, with a copy of its small files in a folder of this host."""

    def __init__(self, address: Address, field: str, cache: PartCache):
        """Bring the copy up to date.

        Args:     field: the setting that holds the address, for errors.
        Raises:   ConfigError if there is no dataset; RunError if it is damaged; StoreError.
        """
        self.address, self._cache = address, cache
        self._objects = Objects(address, field)
        self._arrays: dict[str, StoredArray] = {}
        mark = hashlib.sha256(str(address).encode()).hexdigest()[:12]
        self.path = cache.folder.parent / f"{address.prefix.rpartition('/')[2]}-{mark}"
        self._held = {found.name: found for found in self._objects.names()}
        names = set(self._held)
        if META_FILE not in names:
            fix = f"create it with `{PREPARE} {address}`, or correct the address"
            raise ConfigError(field, str(address), f"has no dataset (no {META_FILE})", fix)
        if STREAM_FILE in names:
            rule = "is a streamed dataset, which needs its text on this host"
            raise ConfigError(field, str(address), rule, "prepare it without --stream")
        small = [self._held[n] for n in sorted(names) if is_dataset_file(n) and not _stays(n)]
        update_copy(self._objects, self.path, small, names, self._check_documents)

    def _check_documents(self, names: list[str]) -> None:
        """Compare copies with meta.json, since they may be another program's, or of a proxy.

        Raises:   ConfigError("data.path", ...) if they differ.
        """
        parts = {documents_file(part.name): part for _, part in read_meta(self.path).parts()}
        for name in sorted(parts.keys() & names):
            offsets = (self.path / name).read_bytes()[-8 * (parts[name].num_documents + 1) :]
            found, recorded = hashlib.sha256(offsets).hexdigest(), parts[name].documents_sha256
            if found != recorded:
                rule = f"{name} has sha256 {found[:16]}, but {META_FILE} records {recorded[:16]}"
                fix = "copy the dataset again, or prepare it again"
                raise ConfigError("data.path", str(self.address), rule, fix)

    def array(self, name: str, dtype: np.dtype, size: int, sha256: str) -> StoredArray:
        """Return the content of an object. If there is room, all of it is fetched meanwhile.

        Args:     size: its bytes, and sha256: their hash, as meta.json records them.
        Raises:   ConfigError("data.path", ...) if it has another size; StoreError.
        """
        if name not in self._arrays:
            found = self._held.get(name)
            if found is None or found.size != size:
                state = "is missing" if found is None else f"has {found.size:,} bytes"
                rule = f"{name} {state}, but {META_FILE} records {size:,} bytes"
                fix = "copy the dataset again, or prepare it again"
                raise ConfigError("data.path", str(self.address), rule, fix)
            fits = self._cache.claimed + size <= self._cache.limit * AFTER
            self._cache.claimed += size * fits
            checksums, stamp = self._checksums(name, size, sha256, fits), Stamp(found.e_tag, None)
            stored = CachedObject(self._objects, name, size, stamp, self._cache, checksums, fits)
            if checksums is None:
                self._check(stored, name, sha256, fits)
            if fits:
                # Each process begins elsewhere, so that together they fetch each part once.
                stored.fetch_all(os.getpid() * 2_654_435_761 % max(stored.num_parts, 1))
            self._arrays[name] = StoredArray(stored, dtype)
        return self._arrays[name]

    def _checksums(
        self, name: str, size: int, sha256: str, fits: bool
    ) -> Callable[[int, int], bytes] | None:
        """Return what returns the checksums of an object; None if nobody has written them.

        Args:     fits: whether the cache can hold the object, and memory all of its checksums.
        """
        other, file = self._held.get(name + CHECKSUMS), self.path / (name + CHECKSUMS)
        expected = HEAD_BYTES + num_blocks(size) * SUM_BYTES
        if other is not None and other.size == expected:
            stamp = Stamp(other.e_tag, None)
            stored = CachedObject(self._objects, other.name, other.size, stamp, self._cache)
            whole = functools.cache(lambda: stored.read(0, stored.size))
            read = (lambda first, last: whole()[first:last]) if fits else stored.read
            return _checksums_in(read, stored.place, sha256)
        content = file.read_bytes() if file.is_file() else b""
        if len(content) != expected or content[:HEAD_BYTES].hex() != sha256:
            return None
        return _checksums_in(lambda first, last: content[first:last], str(file), sha256)

    def _check(self, stored: CachedObject, name: str, sha256: str, fits: bool) -> None:
        """Compare what another program has copied with meta.json, once for a cache.

        Raises:   ConfigError("data.path", ...) if it differs; StoreError.
        """
        what = f"{self.address}/{name}, {units.size(stored.size)}"
        none = f"there is no {name}{CHECKSUMS}"
        if not fits or stored.size > CHECKED_BYTES:
            log(f"WARNING    {what}, is not verified: {none}. {NOT_VERIFIED}")
            return
        log(f"checking   {what}: {none}, so all of it is read once")
        if (sums := stored.check(sha256)) is None:
            rule = f"{name} has other content than {META_FILE} records (sha256 {sha256[:16]})"
            fix = "copy the dataset again, or prepare it again"
            raise ConfigError("data.path", str(self.address), rule, fix)
        with contextlib.suppress(OSError):  # then it is checked at the next start, too
            atomic.write(self.path / (name + CHECKSUMS), bytes.fromhex(sha256) + sums)

    def close(self) -> None:
        """End what is fetched in the background."""
        self._objects.stopped.set()
        for array in self._arrays.values():
            array.stored.stop()
        for array in self._arrays.values():
            array.stored.close()


def local_copy(cfg: Config, field: str, path: str) -> str:
    """Return the folder of the copy of a dataset on this host, which is made.

    Args:     path: an address. Raises:   as `StoredFolder`.
    """
    folder = absolute(cfg.data.cache_dir or cache_folder("data"))
    try:
        cache = _cache(folder / "parts")
    except OSError as error:
        raise _unusable(folder, error) from error
    if (limit := int(cfg.data.cache_gib * 2**30)) != cache.limit:
        cache.limit = limit
        cache.remove_oldest()
    address = read_address(field, path)
    known = (one for one in STORED.values() if one.address == address)
    stored = next((one for one in known if one.path.parent == folder), None)
    if stored is None:
        try:
            stored = StoredFolder(address, field, cache)
        except PermissionError as error:
            raise _unusable(folder, error) from error
        STORED[stored.path] = stored
    return str(stored.path)


def _unusable(folder: Path, error: OSError) -> ConfigError:
    rule = f"cannot be written: {error.strerror}"
    return ConfigError("data.cache_dir", str(folder), rule, "use another folder")


def close_all() -> None:
    """Forget the datasets that this process has opened."""
    for stored in STORED.values():
        stored.close()
    STORED.clear()
    _cache.cache_clear()


@functools.cache
def _cache(folder: Path) -> PartCache:
    return PartCache(folder, 1 << 60)
