"""The thread that uploads a run's folder while the run trains.

It looks at the folder every LOOK_SECONDS: files that have changed, new lines of growing files,
finished checkpoints. The training loop never waits for it, except at the end of the run. A store
that fails does not stop the run: everything is on the host's disk, and is uploaded later.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.runtime.files.run_lock import RunLocked
from jaxpar.stores import steps
from jaxpar.stores.files import Changed
from jaxpar.stores.lease import Lease
from jaxpar.stores.objects import Altered, Missing, Objects, StoreError
from jaxpar.stores.parts import GROWING, Growing
from jaxpar.stores.sessions import begin_session

#: Seconds between two looks at the folder.
LOOK_SECONDS = 1.0

#: Seconds between two parts of a growing file.
PART_SECONDS = 20.0

#: Seconds before a failed upload is tried again: doubled each time, up to the second.
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 5.0, 300.0

#: Seconds that a run waits at its end for its uploads; after an error of the run.
DRAIN_SECONDS, DRAIN_AFTER_ERROR_SECONDS = 3600.0, 30.0

#: What is said after a failure.
GOES_ON = "Training continues, and the upload is tried again"


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


class Mirror:
    """Uploads a run's folder. Use as a context manager, in process 0 only."""

    def __init__(
        self,
        objects: Objects,
        lease: Lease,
        folder: Path,
        keeping: Keeping,
        mark: str,
        log: Callable[[str], None],
    ):
        """Begin a session in the folder and the store, and start the thread.

        Args:     mark: the file that a checkpoint has once it is finished. log: called from the
                  thread with a line for each checkpoint.
        Raises:   StoreError.
        """
        begin_session(objects, folder, lease.session)
        self._objects, self.lease, self._folder = objects, lease, folder
        self._keeping, self._mark, self._log = keeping, mark, log
        self._record: Callable[..., None] | None = None
        self._recording, self._drained = threading.Lock(), False
        self._files = Changed(objects, folder)
        self._growing = [Growing(objects, folder, name) for name in GROWING]
        self._sent: dict[int, tuple[int, int]] = {}
        self._complete: set[int] | None = None
        self._parted, self._failures, self._last_error = 0.0, 0, ""
        self._ending, self._until = threading.Event(), float("inf")
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def record_to(self, record: Callable[..., None] | None) -> None:
        """Call `record` from the thread with events and their fields, until another call."""
        with self._recording:
            self._record = record

    def waiting(self) -> str:
        """Describe what is not in the store yet; empty for nothing."""
        late = self._unsent()
        what = [f"checkpoints of steps {', '.join(map(str, late))}"] if late else []
        what += self._files.waiting()
        growing = ((one.name, one.waiting()) for one in self._growing)
        what += [f"{size:,} bytes of {name}" for name, size in growing if size]
        return "; ".join(what)

    def backlog(self) -> dict[str, float]:
        """Return what is waiting, as metrics: checkpoints, GB, and the age of the oldest one."""
        finished = self._finished()
        late = [step for step, about in finished.items() if self._sent.get(step) != about]
        num_bytes = sum(one.waiting() for one in self._growing)
        num_bytes += sum(_size_of(self._folder / steps.STEPS / str(step)) for step in late)
        oldest = min((finished[step][0] / 1e9 for step in late), default=time.time())
        return {
            "store_waiting_steps": len(late),
            "store_waiting_gb": num_bytes / 1e9,
            "store_waiting_seconds": max(time.time() - oldest, 0.0),
        }

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
            rest = f"is in {self._folder}; the same command on this host uploads it"
            _warn(f"not in {self._objects.address}{why}: {waiting}. It {rest}")
        return not waiting

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.drain(DRAIN_SECONDS if error is None else DRAIN_AFTER_ERROR_SECONDS)

    # ---------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while True:
            ending = self._ending.wait(pause)
            try:
                self._pass(ending)
            except RunLocked as error:
                self._last_error = str(error)
                return
            except Exception as error:  # whatever it is, the run and later uploads go on
                self._failures += 1
                self._last_error = str(error) or type(error).__name__
                pause = min(PAUSE_SECONDS * 2 ** (self._failures - 1), MAX_PAUSE_SECONDS)
                if self._failures == 1:
                    _warn(f"{self._last_error}\n           {GOES_ON}")
                if ending and time.monotonic() + min(pause, LOOK_SECONDS) > self._until:
                    return
                if ending:
                    self._objects.stopped.wait(min(pause, self._until - time.monotonic()))
            else:
                if self._failures:
                    self._log(f"store      {self._objects.address} works again")
                pause, self._failures, self._last_error = LOOK_SECONDS, 0, ""
                if ending:
                    return

    def _pass(self, ending: bool) -> None:
        """Upload everything that is new. Raises:   StoreError; ConfigError; OSError."""
        self._require_lease()
        if self._complete is None:
            self._complete = self._first_look()
        self._files.upload()
        for step in reversed(self._unsent()):  # the newest first: the others may be deleted soon
            self._upload(step)
        if ending or time.monotonic() - self._parted >= PART_SECONDS:
            for one in self._growing:
                one.upload()
            self._parted = time.monotonic()

    def _require_lease(self) -> None:
        self.lease.check()
        if not self.lease.is_held():
            raise StoreError(f"{self._objects.address}: the lease could not be renewed")

    def _first_look(self) -> set[int]:
        """Return the complete checkpoints of the store. Deletes what killed uploads have left."""
        complete, local = set(steps.complete_steps(self._objects)), self._finished()
        for step in steps.incomplete_steps(self._objects, complete):
            if step not in local:  # otherwise it is uploaded again
                steps.delete_step(self._objects, step)
        for step, signature in local.items():
            with contextlib.suppress(Missing, Altered):
                if step in complete and steps.is_same(
                    self._objects, self._folder, step, (self._mark,)
                ):
                    self._sent[step] = signature
        return complete

    def _finished(self) -> dict[int, tuple[int, int]]:
        """Return the finished checkpoints of the folder, with what tells two saves apart."""
        found = {}
        for mark in (self._folder / steps.STEPS).glob(f"*/{self._mark}"):
            if mark.parent.name.isdecimal():
                with contextlib.suppress(FileNotFoundError):
                    about = mark.stat()
                    found[int(mark.parent.name)] = about.st_mtime_ns, about.st_ino
        return found

    def _unsent(self) -> list[int]:
        finished = self._finished()
        return sorted(step for step, about in finished.items() if self._sent.get(step) != about)

    def _upload(self, step: int) -> None:
        signature = self._finished().get(step)
        if signature is None:
            return
        assert self._complete is not None
        began = time.monotonic()
        self._complete.discard(step)
        try:
            num_bytes = steps.upload_step(self._objects, self._folder, step, self._require_lease)
        except FileNotFoundError:  # the run has deleted it meanwhile
            steps.delete_step(self._objects, step)
            return
        if self._finished().get(step) != signature:  # another save of the step
            steps.delete_step(self._objects, step)
            return
        self._sent[step] = signature
        self._complete.add(step)
        seconds = time.monotonic() - began
        self._delete_outdated()
        waiting = self.backlog()
        late = int(waiting["store_waiting_steps"])
        behind = f"; {late} more waiting, {waiting['store_waiting_gb']:.3f} GB, "
        behind += f"the oldest for {waiting['store_waiting_seconds']:.0f} s"
        behind = behind if late else ""
        rate = num_bytes / 1e9 / max(seconds, 1e-9)
        size = f"{num_bytes / 1e9:.3f} GB in {seconds:.1f} s, {rate:.2f} GB/s"
        with self._recording:
            if self._record is not None:
                self._record("stored", step=step, bytes=num_bytes, seconds=seconds, waiting=late)
        self._log(f"stored step {step}: {size}{behind}")

    def _delete_outdated(self) -> None:
        assert self._complete is not None
        for step in self._keeping.outdated(self._complete, set(self._finished())):
            self._require_lease()
            steps.delete_step(self._objects, step)
            self._complete.discard(step)
            self._sent.pop(step, None)


def _size_of(folder: Path) -> int:
    """Return the bytes of the files below a folder, which may be deleted meanwhile."""
    count = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            count += file.stat().st_size if file.is_file() else 0
    return count


def _warn(text: str) -> None:
    print(f"WARNING    {text}", file=sys.stderr, flush=True)
