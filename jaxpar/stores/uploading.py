"""A thread that uploads what appears in a folder, and tries again when the store fails.

The training loop never waits for it, except at the end of the run. A store that fails does not stop
the run: everything is on the host's disk, and is uploaded later.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from jaxpar.runtime.exit_codes import EXIT_NOT_STORED, RunError
from jaxpar.runtime.files.run_lock import RunLocked
from jaxpar.runtime.messages import warn
from jaxpar.stores.objects import Objects

#: Seconds between two looks at the folder.
LOOK_SECONDS = 1.0

#: Seconds before a failed upload is tried again: doubled each time, up to the second.
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 5.0, 300.0

#: Seconds that a run waits at its end for its uploads; after an error of the run.
DRAIN_SECONDS, DRAIN_AFTER_ERROR_SECONDS = 3600.0, 30.0

#: Seconds for which uploads that fail are tried again at the end, with at most the second between.
DRAIN_FAILING_SECONDS, DRAIN_PAUSE_SECONDS = 300.0, 15.0

#: Failures in a row between two warnings, after the first.
WARN_EVERY = 10

#: What is said after a failure.
GOES_ON = "Training continues, and the upload is tried again"


class NotStored(RunError):
    """A run has ended, and not all of it is in its store."""

    code = EXIT_NOT_STORED


class Uploader(ABC):
    """Calls `look` every LOOK_SECONDS on a thread. A context manager."""

    def __init__(self, objects: Objects, folder: Path, log: Callable[[str], None], name: str):
        """
        Args:     folder: what is uploaded, for messages. log: called from the thread. name: of the
                  thread, which `start` starts.
        """
        self._objects, self._folder, self._log = objects, folder, log
        self._drained, self._failures, self._last_error = False, 0, ""
        self._ending, self._until = threading.Event(), float("inf")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @abstractmethod
    def look(self, ending: bool) -> bool:
        """Upload everything that is new. Called on the thread.

        Args:     ending: of the run: nothing new will appear.
        Returns:  whether all is uploaded; False if something else must happen first.
        Raises:   StoreError; ConfigError; OSError: it is called again.
        """

    @abstractmethod
    def waiting(self) -> str:
        """Describe what is not in the store yet; empty for nothing."""

    @abstractmethod
    def late_steps(self) -> list[int]:
        """Return the finished checkpoints that are not in the store yet, ascending."""

    def wait(self, seconds: float) -> None:
        """Wait until the checkpoints that are finished are in the store, or for some seconds."""
        until = time.monotonic() + seconds
        while self.late_steps() and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(min(LOOK_SECONDS, 0.2))

    def drain(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Upload what is waiting, and end the thread. Returns:  whether all is in the store."""
        if self._drained:
            return not self.waiting()
        self._until, self._drained = time.monotonic() + seconds, True
        if waiting := self.waiting():
            self._log(f"uploading  {waiting}")
        self._ending.set()
        self._thread.join(seconds)
        self._objects.stopped.set()
        self._thread.join(1.0)
        waiting = self.waiting()
        if waiting:
            why = f" ({self._last_error})" if self._last_error else ""
            rest = f"is in {self._folder}. Fix the cause; the same command on this host uploads it"
            warn(f"not in {self._objects.address}{why}: {waiting}. It {rest}")
        return not waiting

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.drain(DRAIN_SECONDS if error is None else DRAIN_AFTER_ERROR_SECONDS)

    def _run(self) -> None:
        pause, failing = LOOK_SECONDS, float("inf")
        while True:
            ending = self._ending.wait(pause)
            try:
                done = self.look(ending)
            except RunLocked as error:
                self._last_error = str(error)
                return
            except Exception as error:  # whatever it is, the run and later uploads go on
                done = False
                self._failures += 1
                self._last_error = str(error) or type(error).__name__
                pause = min(PAUSE_SECONDS * 2 ** (self._failures - 1), MAX_PAUSE_SECONDS)
                if ending:
                    pause = min(pause, DRAIN_PAUSE_SECONDS)
                    failing = min(failing, time.monotonic() + DRAIN_FAILING_SECONDS)
                    if time.monotonic() >= failing:
                        return
                if self._failures == 1:
                    warn(f"{self._last_error}\n           {GOES_ON}")
                elif self._failures % WARN_EVERY == 0:
                    text = f"has failed {self._failures} times in a row: {self._last_error}"
                    warn(f"the upload to {self._objects.address} {text}")
            else:
                failing = float("inf")
                if self._failures:
                    self._log(f"store      {self._objects.address} works again")
                    self._last_error = ""
                pause, self._failures = LOOK_SECONDS, 0
            if ending and (done or not self._pause_within_limit(pause)):
                return

    def _pause_within_limit(self, pause: float) -> bool:
        """Wait before another look at the end of a run. Returns:  False if it would be too late."""
        if time.monotonic() + min(pause, LOOK_SECONDS) > self._until:
            return False
        self._objects.stopped.wait(min(pause, self._until - time.monotonic()))
        return True
