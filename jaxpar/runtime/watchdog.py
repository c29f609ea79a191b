"""A run that no longer gets anywhere is ended, and leaves word of where it was.

Each process watches itself: the loop says what it enters, and until when that must be over. When
the time is up, every process writes its Python stacks to RUN/ranks/N.stacks.txt and its step and
phase to RUN/ranks/N.json, and ends with 124. On GPUs the one whose own time is up also asks NCCL
which ranks have fallen behind (RUN/ranks/N.nccl.txt), and process 0 lists the collectives of a step
in their order (RUN/ranks/collectives.txt). JAX's heartbeat does not see such hangs: a process
that is alive and stuck still beats.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxpar.runtime import exit_codes
from jaxpar.runtime.gpus import nccl_ras, visible
from jaxpar.runtime.processes import peers

#: Seconds between two looks at whether another process has hung.
LOOK_SECONDS = 2.0

#: How long a process that has hung waits for the others to see it too, and write their stacks.
TELL_SECONDS = 6.0

#: How long NCCL is asked, and the step's program read, at most.
REPORT_SECONDS = 8.0

#: Beyond the limit, for the case that a C function keeps Python from running at all.
EXTRA_SECONDS = 60.0

#: Lines of NCCL's findings that are shown; the file has all.
MAX_LINES_SHOWN = 20

#: The descriptor of the process's own standard error.
STDERR = 2

_TOPIC = "hung"

_current: "Watchdog | None" = None


class Watchdog:
    """Watches this process. Use as a context manager; `enter` costs a microsecond."""

    def __init__(self, run_dir: str | Path, hang_seconds: float, slow_seconds: float):
        """Args:     the limits, as in the section `cluster` of the config; 0: none."""
        self.run_dir = Path(run_dir).absolute()
        self._folder = self.run_dir / "ranks"
        self._limits = (hang_seconds, slow_seconds)
        #: Gives the collectives of a step in their order, once that is compiled.
        self.report: Callable[[], list[str]] | None = None
        self._over, self._ending = threading.Event(), threading.Lock()
        self._at: tuple[str, int, float, float] = ("start", 0, 0.0, 0.0)
        self.enter("start", 0, slow=True)

    def enter(self, phase: str, step: int, *, slow: bool = False) -> None:
        """Say what is done next, for which step, and start the clock anew.

        Args:     slow: it has `slow_seconds`, not `hang_seconds`.
        """
        now, limit = time.monotonic(), self._limits[slow]
        self._at = (phase, step, now, now + limit if limit else float("inf"))

    def __enter__(self) -> "Watchdog":
        global _current
        _current = self
        watches = (self._watch_self, self._watch_others)
        self._threads = [threading.Thread(target=w, name="watchdog", daemon=True) for w in watches]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        global _current
        if error is None:
            _current = None  # else it is still to write the last words
        self._over.set()
        self._threads[0].join(5)  # so that it does not set faulthandler's clock once more
        faulthandler.cancel_dump_traceback_later()

    def _watch_self(self) -> None:
        shortest = min((limit for limit in self._limits if limit), default=0.0)
        if not shortest:
            return
        backup = max(self._limits) + EXTRA_SECONDS
        last = time.monotonic()
        while not self._over.wait(min(1.0, shortest / 4)):
            now = time.monotonic()
            if now - last > max(5.0, shortest / 2):  # this process was stopped: not the loop's time
                phase, step, since, until = self._at
                self._at = (phase, step, since, until + now - last)
            last = now
            # By its descriptor: sys.stderr of a notebook, or of a test, is no file.
            faulthandler.dump_traceback_later(backup, exit=True, file=STDERR)
            phase, step, since, until = self._at
            if now > until:
                self._end(f"step {step}, {phase}: not over after {now - since:.0f} s", first=True)

    def _watch_others(self) -> None:
        while peers.world_size() > 1 and not self._over.wait(LOOK_SECONDS):
            try:
                hung = peers.read_published(_TOPIC)
            except RuntimeError:
                return  # the coordinator is gone, and JAX ends this process
            for process, text in hung.items():
                self._end(f"{peers.process_name(process)} hangs at {text}")

    def _end(self, why: str, *, first: bool = False) -> None:
        """Write the last words, give the others time for theirs, and end with 124 in any case.

        Args:     first: it is this process's own time that is up.
        """
        if not self._ending.acquire(blocking=False):
            time.sleep(3600)  # the other thread is at it, and ends them both
        try:
            phase, step, _, _ = self._at
            # All in threads: the others may be stopped, and the folder's file system may hang.
            _start(self._tell, f"step {step}, {phase}")
            reports = [_start(self._log_why, why), _start(self._collectives)]
            if first and visible.gpu_is_present():
                reports.append(_start(self._ask_nccl))
            until = time.monotonic() + REPORT_SECONDS
            self._over.wait(TELL_SECONDS + (peers.rank() == 0))
            for thread in reports:
                thread.join(max(until - time.monotonic(), 0))
        finally:
            os._exit(exit_codes.EXIT_HANG)

    def _log_why(self, why: str) -> None:
        """Write the last words and the stacks; to stderr, where the folder takes no file."""
        with contextlib.suppress(OSError):
            self.write(exit_codes.EXIT_HANG, f"hang: {why}")
        stacks = self._folder / f"{peers.rank()}.stacks.txt"
        where = f"in {stacks}"
        try:
            with open(stacks, "a") as file:
                file.write(f"{_now()} {why}\n")
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as error:
            faulthandler.dump_traceback(STDERR)
            where = f"above, since {stacks} cannot be written ({error.strerror})"
        told = f"hang: {peers.process_name(peers.rank())}: {why}; stacks {where}"
        print(told, file=sys.stderr, flush=True)

    def _tell(self, where: str) -> None:
        """Let the others know, and stop waiting once all have said the same."""
        try:
            peers.publish(_TOPIC, where)
            while peers.world_size() > max(len(peers.read_published(_TOPIC)), 1):
                time.sleep(0.1)
            time.sleep(0.5)  # theirs are being written
        except RuntimeError:
            pass  # the coordinator is gone: nobody is left to be told
        self._over.set()

    def _ask_nccl(self) -> None:
        """Write what NCCL says of all ranks, and show what it finds wrong."""
        file = self._folder / f"{peers.rank()}.nccl.txt"
        try:
            report = nccl_ras.status(REPORT_SECONDS - 1)
        except nccl_ras.NoAnswer as error:
            print(f"hang: {error}", file=sys.stderr, flush=True)
            return
        with contextlib.suppress(OSError):  # what is wrong is shown all the same
            file.write_text(report)
        found = nccl_ras.what_is_wrong(report) or ["names no rank that is behind"]
        shown = "\n".join(f"    {line}" for line in found[:MAX_LINES_SHOWN])
        print(f"hang: NCCL ({file}):\n{shown}", file=sys.stderr, flush=True)

    def _collectives(self) -> None:
        """Write the collectives of a step, in their order: what NCCL counts."""
        if self.report is None or peers.rank() != 0:
            return
        order = "\n".join(self.report()) + "\n"
        with contextlib.suppress(OSError):
            (self._folder / "collectives.txt").write_text(order)

    def write(self, code: int, error: str) -> None:
        """Write this process's last words to RUN/ranks/N.json."""
        phase, step, since, _ = self._at
        words = {
            "process": peers.process_name(peers.rank()),
            "pid": os.getpid(),
            "time": time.time(),
            "code": code,
            "error": error,
            "step": step,
            "phase": phase,
            "seconds_in_phase": round(time.monotonic() - since, 3),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        own = self._folder / f"{peers.rank()}.json"
        own.write_text(json.dumps(words) + "\n")


def last_words(code: int, error: str) -> None:
    """Write why this process ends, and where it was, if it was being watched."""
    if _current is not None and _current.run_dir.exists():
        _current.write(code, error)


def _start(work: Callable[..., None], *args: Any) -> threading.Thread:
    """A thread that this process does not wait for at its end."""
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
