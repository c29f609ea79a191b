"""Keeps a run's folder while it trains: its lock, and the lease on its store."""

from pathlib import Path

from jaxpar.runtime import watchdog
from jaxpar.runtime.files import append
from jaxpar.runtime.files.run_lock import RunLock, RunLocked
from jaxpar.stores.lease import Lease


class RunRecords:
    """The lock of a run folder, and the lease. None but in process 0."""

    def __init__(self, folder: Path):
        self.lock: RunLock | None = None
        #: The lease on the run's store, if it has one.
        self.lease: Lease | None = None
        self._folder = folder

    def check_lock(self, at_once: bool = False) -> None:
        """Check that this process may still write the folder. Args and Raises as `RunLock.check`.

        After RunLocked, nothing more is appended to files of the folder.
        """
        if self.lock is None:
            return
        try:
            self.lock.check(at_once)
            if self.lease is not None:
                self.lease.check()
        except RunLocked:
            append.abandon(self._folder)
            watchdog.without_last_words()
            raise
