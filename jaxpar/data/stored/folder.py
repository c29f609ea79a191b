"""The copy of a dataset in a store: its small files, on this host. Its tokens stay in the store."""

import functools
import hashlib
import os
from pathlib import Path

import numpy as np

from jaxpar.config import Config, ConfigError
from jaxpar.config.rules.paths import Address, absolute, cache_folder, is_address, read_address
from jaxpar.data.formats.meta import DATASET_FILES, META_FILE, PREPARE, STREAM_FILE
from jaxpar.data.stored.array import StoredArray
from jaxpar.data.stored.writing import PARTS, keep_parts, kept_parts, read_parts
from jaxpar.runtime import progress as units
from jaxpar.runtime.processes.peers import log
from jaxpar.stores.cache import AFTER, CachedObject, PartCache
from jaxpar.stores.folders import update_copy
from jaxpar.stores.objects import Missing, Objects, Stamp

#: Files that stay in the store.
LARGE = ".bin"

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
        names = {found.name for found in self._objects.names()}
        if META_FILE not in names:
            fix = f"create it with `{PREPARE} {address}`, or correct the address"
            raise ConfigError(field, str(address), f"has no dataset (no {META_FILE})", fix)
        if STREAM_FILE in names:
            rule = "is a streamed dataset, which needs its text on this host"
            raise ConfigError(field, str(address), rule, "prepare it without --stream")
        small = [name for name in sorted(names & DATASET_FILES) if not name.endswith(LARGE)]
        update_copy(self._objects, self.path, small, names, again=True)

    def array(self, name: str, dtype: np.dtype, size: int, sha256: str) -> StoredArray:
        """Return the content of an object. If there is room, all of it is fetched meanwhile.

        Args:     size: its bytes, and sha256: their hash, as meta.json records them.
        Raises:   ConfigError("data.path", ...) if it has another size; StoreError.
        """
        if name not in self._arrays:
            fix = "copy the dataset again, or prepare it again"
            try:
                found, stamp = self._objects.about(name)
            except Missing:
                found, stamp = -1, Stamp(None, None)
            if found != size:
                state = "is missing" if found < 0 else f"has {found:,} bytes"
                rule = f"{name} {state}, but {META_FILE} records {size:,} bytes"
                raise ConfigError("data.path", str(self.address), rule, fix)
            digests = read_parts(self._objects, name + PARTS, size, sha256)
            digests = digests or kept_parts(self.path / (name + PARTS), size, sha256)
            stored = CachedObject(self._objects, name, size, stamp, self._cache, digests)
            self._cache.claimed += size
            fits = self._cache.claimed <= self._cache.limit * AFTER
            if not digests:
                self._check(stored, name, sha256, fits)
            if fits:
                # Each process begins elsewhere, so that together they fetch each part once.
                stored.fetch_all(os.getpid() * 2_654_435_761 % max(stored.num_parts, 1))
            self._arrays[name] = StoredArray(stored, dtype)
        return self._arrays[name]

    def _check(self, stored: CachedObject, name: str, sha256: str, fits: bool) -> None:
        """Compare what another program has copied with meta.json, once for a cache.

        Raises:   ConfigError("data.path", ...) if it differs; StoreError.
        """
        what = f"{self.address}/{name}, {units.size(stored.size)}"
        if not fits or stored.size > CHECKED_BYTES:
            log(f"WARNING    {what}, is not verified: there is no {name}{PARTS}. {NOT_VERIFIED}")
            return
        log(f"checking   {what}: there is no {name}{PARTS}, so all of it is read once")
        if (digests := stored.check(sha256)) is None:
            rule = f"{name} has other content than {META_FILE} records (sha256 {sha256[:16]})"
            fix = "copy the dataset again, or prepare it again"
            raise ConfigError("data.path", str(self.address), rule, fix)
        keep_parts(self.path / (name + PARTS), sha256, digests)

    def close(self) -> None:
        """End what is fetched in the background."""
        self._objects.stopped.set()
        for array in self._arrays.values():
            array.stored.close()


_opened: dict[Path, StoredFolder] = {}


def local(cfg: Config, field: str, path: str) -> str:
    """Return the path of a dataset on this host: for an address, that of its copy, which is made.

    Raises:   as `StoredFolder`.
    """
    if not is_address(path):
        return path
    folder = absolute(cfg.data.cache_dir or cache_folder("data"))
    try:
        cache = _cache(folder / "parts")
    except OSError as error:
        raise _unusable(folder, error) from error
    if (limit := int(cfg.data.cache_gib * 2**30)) != cache.limit:
        cache.limit = limit
        cache.remove_oldest()
    address = read_address(field, path)
    known = (one for one in _opened.values() if one.address == address)
    stored = next((one for one in known if one.path.parent == folder), None)
    if stored is None:
        try:
            stored = StoredFolder(address, field, cache)
        except PermissionError as error:
            raise _unusable(folder, error) from error
        _opened[stored.path] = stored
    return str(stored.path)


def _unusable(folder: Path, error: OSError) -> ConfigError:
    rule = f"cannot be written: {error.strerror}"
    return ConfigError("data.cache_dir", str(folder), rule, "use another folder")


def opened(folder: Path) -> StoredFolder | None:
    """Return the dataset of a store whose copy a folder is, if this process has opened it."""
    return _opened.get(folder)


def close_all() -> None:
    """Forget the datasets that this process has opened."""
    for stored in _opened.values():
        stored.close()
    _opened.clear()
    _cache.cache_clear()


@functools.cache
def _cache(folder: Path) -> PartCache:
    return PartCache(folder, 1 << 60)
