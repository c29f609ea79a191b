"""Threads that upload what appears in the folder of a run while it trains.

The training loop never waits for them, except at the end of the run. A store that fails does not
stop the run: everything is on the host's disk, and is uploaded later. A thread looks at the folder
every LOOK_SECONDS: files that have changed, new lines of growing files, finished checkpoints.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxpar.config import ConfigError
from jaxpar.runtime.exit_codes import EXIT_NOT_STORED, RunError
from jaxpar.runtime.files.lock import RunLocked
from jaxpar.runtime.terminal import warn
from jaxpar.runtime.units import transfer
from jaxpar.stores import steps
from jaxpar.stores.files import GROWING, Changed, Growing, begin_session, last_session, sessions_of
from jaxpar.stores.lease import Lease
from jaxpar.stores.objects import Altered, Missing, Objects, OddName, StoreError
from jaxpar.stores.shards import ProcessShards

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


#: Seconds between two parts of a growing file.
PART_SECONDS = 20.0


@dataclass(frozen=True)
class Keeping:
    """Which checkpoints a store keeps: as `checkpoint.keep*`, by numbers of steps."""

    latest: int
    every: int
    best: Callable[[], int]
    """Returns the step of the best evaluation; 0 for none."""

    def outdated(self, complete: set[int], local: set[int]) -> list[int]:
        """Return the complete checkpoints to delete: old ones that the folder does not keep."""
        newest = sorted(complete)[-self.latest :]
        kept = local | set(newest) | {self.best()}
        kept |= {step for step in complete if self.every and step % self.every == 0}
        return sorted(complete - kept)


class Mirror(Uploader):
    """Uploads a run's folder. Use as a context manager, in process 0 only."""

    def __init__(
        self,
        objects: Objects,
        lease: Lease,
        folder: Path,
        keeping: Keeping,
        log: Callable[[str], None],
        shards: ProcessShards | None = None,
    ):
        """Begin a session in the folder and the store, and start the thread.

        Args:     log: called from the thread with a line for each checkpoint. shards: those of
                  process 0, if processes share no folder.
        Raises:   StoreError.
        """
        super().__init__(objects, folder, log, "mirror")
        begin_session(objects, folder, lease.session)
        self.lease, self._keeping = lease, keeping
        self._shards = shards
        #: Has the checkpoints that are uploaded.
        self._place = shards.folder if shards is not None else folder
        self._record: Callable[..., None] | None = None
        self._recording = threading.Lock()
        self._files = Changed(objects, folder)
        self._growing = [Growing(objects, folder, name) for name in GROWING]
        self._sent: dict[int, tuple[int, int]] = {}
        self._began: dict[int, float] = {}
        self._complete: set[int] | None = None
        self._parted = 0.0
        if shards is not None:  # later, it would delete what other processes have begun to upload
            self._complete = self._first_look()
        self.start()

    def record_to(self, record: Callable[..., None] | None) -> None:
        """Call `record` from the thread with events and their fields, until another call."""
        with self._recording:
            self._record = record

    def waiting(self) -> str:
        """Describe what is not in the store yet; empty for nothing."""
        late = self.late_steps()
        what = [f"checkpoints of steps {', '.join(map(str, late))}"] if late else []
        what += self._files.waiting()
        growing = ((one.name, one.waiting()) for one in self._growing)
        what += [f"{size:,} bytes of {name}" for name, size in growing if size]
        return "; ".join(what)

    def late_steps(self) -> list[int]:
        """As `Uploader.late_steps`."""
        finished = self._finished()
        return sorted(step for step, about in finished.items() if self._sent.get(step) != about)

    def backlog(self) -> dict[str, float]:
        """Return what is waiting, as metrics: checkpoints, GB, and the age of the oldest one."""
        finished = self._finished()
        late = [step for step, about in finished.items() if self._sent.get(step) != about]
        num_bytes = sum(one.waiting() for one in self._growing)
        num_bytes += sum(_size_of(self._place / steps.STEPS / str(step)) for step in late)
        oldest = min((finished[step][0] / 1e9 for step in late), default=time.time())
        return {
            "store_waiting_steps": len(late),
            "store_waiting_gb": num_bytes / 1e9,
            "store_waiting_seconds": max(time.time() - oldest, 0.0),
        }

    # ---------------------------------------------------------------------------- on the thread

    def look(self, ending: bool) -> bool:
        """As `Uploader.look`. Raises:   also RunLocked, after which it is not called again."""
        self._require_lease()
        if self._complete is None:
            self._complete = self._first_look()
        failure = self._files_failure()
        for step in reversed(self.late_steps()):  # the newest first: the others may be deleted soon
            self._upload(step)
        # Those deleted before they were complete.
        for step in sorted(self._began.keys() - self._finished().keys()):
            steps.delete_step(self._objects, step)
            del self._began[step]
        if ending or time.monotonic() - self._parted >= PART_SECONDS:
            for one in self._growing:
                one.upload()
            self._parted = time.monotonic()
        if failure is not None:
            raise failure
        return not self.late_steps()

    def _files_failure(self) -> Exception | None:
        """Upload the files that have changed. An error of theirs keeps no checkpoint waiting."""
        try:
            self._files.upload()
        except (StoreError, ConfigError, OSError) as error:
            return error
        return None

    def _require_lease(self) -> None:
        self.lease.check()
        if not self.lease.is_held():
            raise StoreError(f"{self._objects.address}: the lease could not be renewed")

    def _first_look(self) -> set[int]:
        """Return the complete checkpoints of the store. Deletes what killed uploads have left."""
        complete, local = set(steps.complete_steps(self._objects)), self._finished()
        try:
            for step in steps.incomplete_steps(self._objects, complete):
                if step not in local:  # otherwise it is uploaded again
                    steps.delete_step(self._objects, step)
        except OddName as error:  # what is left stays there
            warn(str(error))
        for step, signature in local.items():
            with contextlib.suppress(Missing, Altered):
                if step in complete and steps.is_same(self._objects, self._place, step):
                    self._sent[step] = signature
        return complete

    def _finished(self) -> dict[int, tuple[int, int]]:
        return steps.finished_steps(self._place)

    def _upload(self, step: int) -> None:
        signature = self._finished().get(step)
        if signature is None:
            return
        assert self._complete is not None
        began = self._began.setdefault(step, time.monotonic())
        self._complete.discard(step)
        try:
            if self._shards is not None:
                num_bytes = self._shards.complete(step, self._require_lease)
            else:
                num_bytes = steps.upload_step(self._objects, self._place, step, self._require_lease)
        except FileNotFoundError:  # the run has deleted it meanwhile; so does `look`
            return
        except Altered as error:
            warn(f"step {step} cannot be completed in {self._objects.address}: {error}")
            steps.delete_step(self._objects, step)
            self._sent[step] = signature
            self._began.pop(step)
            return
        if num_bytes is None:
            self._last_error = f"step {step} is not uploaded by all processes yet"
            return
        if self._finished().get(step) != signature:  # another save of the step
            steps.delete_step(self._objects, step)
            return
        self._sent[step] = signature
        self._complete.add(step)
        seconds = time.monotonic() - self._began.pop(step, began)
        self._delete_outdated()
        waiting = self.backlog()
        late = int(waiting["store_waiting_steps"])
        behind = f"; {late} more waiting, {waiting['store_waiting_gb']:.3f} GB, "
        behind += f"the oldest for {waiting['store_waiting_seconds']:.0f} s"
        behind = behind if late else ""
        with self._recording:
            if self._record is not None:
                self._record("stored", step=step, bytes=num_bytes, seconds=seconds, waiting=late)
        self._log(f"stored step {step}: {transfer(num_bytes, seconds)}{behind}")

    def _delete_outdated(self) -> None:
        assert self._complete is not None
        for step in self._keeping.outdated(self._complete, set(self._finished())):
            self._require_lease()
            steps.delete_step(self._objects, step)
            self._complete.discard(step)
            self._sent.pop(step, None)


def upload_rest(objects: Objects, lease: Lease, folder: Path, log: Callable[[str], None]) -> None:
    """Upload what only a folder has of the store's last session, before other hosts download it.

    Args, Raises:   as `Mirror`.
    """
    if last_session(objects) not in sessions_of(folder):
        return
    Changed(objects, folder).upload()
    for name in GROWING:
        Growing(objects, folder, name).upload()
    complete = steps.complete_steps(objects)
    for step in steps.finished_steps(folder):
        if step not in complete:
            log(f"uploading  step {step}")
            steps.upload_step(objects, folder, step, lease.check)


def _size_of(folder: Path) -> int:
    """Return the bytes of the files below a folder, which may be deleted meanwhile."""
    count = 0
    for file in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            count += file.stat().st_size if file.is_file() else 0
    return count


class ShardMirror(Uploader):
    """Uploads the shards that this process saves. A context manager.

    It holds no lease: what it uploads is in no checkpoint before process 0, which does, says so.
    """

    def __init__(self, objects: Objects, shards: ProcessShards, log: Callable[[str], None]):
        """Start the thread."""
        super().__init__(objects, shards.folder, log, "shards")
        self._shards = shards
        self._sent: dict[int, tuple[int, int]] = {}
        self.start()

    def look(self, ending: bool) -> bool:
        """As `Uploader.look`."""
        for step, about in sorted(self._unsent().items(), reverse=True):
            try:
                self._shards.send(step)
            except FileNotFoundError:  # the run has deleted it meanwhile
                continue
            self._sent[step] = about
        return not self._unsent()

    def late_steps(self) -> list[int]:
        """As `Uploader.late_steps`."""
        return sorted(self._unsent())

    def waiting(self) -> str:
        """As `Uploader.waiting`."""
        late = self.late_steps()
        return f"shards of steps {', '.join(map(str, late))}" if late else ""

    def _unsent(self) -> dict[int, tuple[int, int]]:
        found = steps.finished_steps(self._shards.folder)
        return {step: about for step, about in found.items() if self._sent.get(step) != about}
