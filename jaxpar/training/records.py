"""Keeps a run's folder while it trains: its lock, and the files of its start.

Someone may delete the folder, or files in it, while the run writes there.
"""

from pathlib import Path

from jaxpar.runtime import watchdog
from jaxpar.runtime.files import append, atomic
from jaxpar.runtime.files.run_lock import RunLock, RunLocked
from jaxpar.runtime.messages import warn
from jaxpar.stores.lease import Lease


class RunRecords:
    """The lock of a run folder, and the files that are written once. Empty but in process 0."""

    def __init__(self, folder: Path, lock: RunLock | None = None, lease: Lease | None = None):
        """Args:     lease: on the run's store, if it has one."""
        self._folder, self._texts = folder, dict[Path, str]()
        self._lock, self._lease = lock, lease

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder, and remember its text.

        Raises:   OSError that names the file, for example when the disk is full.
        """
        path = self._folder / name
        atomic.write(path, text.encode())
        self._texts[path] = text

    def check_lock(self, at_once: bool = False) -> None:
        """Check that this process may still write the folder. Args and Raises as `RunLock.check`.

        After RunLocked, nothing more is appended to files of the folder.
        """
        if self._lock is None:
            return
        try:
            self._lock.check(at_once)
            if self._lease is not None:
                self._lease.check()
        except RunLocked:
            append.abandon(self._folder)
            watchdog.without_last_words()
            raise

    def before_save(self) -> None:
        """Check the lock at once, then write the files again that were deleted."""
        self.check_lock(at_once=True)
        self._write_missing()

    def _write_missing(self) -> None:
        """Write the files again that were deleted, with a warning."""
        missing = [path for path in self._texts if not path.is_file()]
        for path in missing:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic.write(path, self._texts[path].encode())
            except OSError as error:
                how = f"and cannot be written again: {error.strerror}"
            else:
                how = "it was written again"
            warn(f"{path} was deleted during the run; {how}")
