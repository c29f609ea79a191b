"""End a run that hangs, and record where it was.

Each process watches itself: the loop reports the phase that it enters and its time limit. When a
limit is exceeded, every process writes its Python stacks to RUN/ranks/N.stacks.txt and its step and
phase to RUN/ranks/N.json, and ends with code 124. On GPUs, the process whose limit was exceeded
also asks NCCL which ranks are behind (RUN/ranks/N.nccl.txt), and process 0 lists the collectives of
a step in their order (RUN/ranks/collectives.txt). JAX's heartbeat does not detect such hangs, since
a stuck process still sends heartbeats.
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

from jaxpar.config.rules.paths import absolute
from jaxpar.runtime import exit_codes
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.processes import peers

#: Seconds between checks whether another process has hung.
LOOK_SECONDS = 2.0

#: Seconds that a hung process waits for the others to notice and to write their stacks.
TELL_SECONDS = 6.0

#: Maximum seconds for querying NCCL and for reading the step's program.
REPORT_SECONDS = 8.0

#: Seconds beyond the limit until faulthandler ends the process, if a C function blocks Python.
EXTRA_SECONDS = 60.0

#: Maximum lines of NCCL's report to print; the file has all.
MAX_LINES_SHOWN = 20

#: The file descriptor of standard error.
STDERR = 2

_TOPIC = "hung"

_current: "Watchdog | None" = None


class Watchdog:
    """Watches this process for hangs. Use as a context manager; `enter` takes a microsecond."""

    def __init__(self, run_dir: str | Path, hang_seconds: float, slow_seconds: float):
        """Args:     hang_seconds, slow_seconds: limits as in section `cluster`; 0: no limit."""
        self.run_dir = absolute(run_dir)
        self._folder = self.run_dir / "ranks"
        self._limits = (hang_seconds, slow_seconds)
        #: Returns the collectives of a step in their order, once the step is compiled.
        self.report: Callable[[], list[str]] | None = None
        self._over, self._ending = threading.Event(), threading.Lock()
        self._at: tuple[str, int, float, float] = ("start", 0, 0.0, 0.0)
        self.enter("start", 0, slow=True)

    def enter(self, phase: str, step: int, *, slow: bool = False) -> None:
        """Report the next phase and its step, and restart the clock.

        Args:     slow: the limit is `slow_seconds`, not `hang_seconds`.
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
            _current = None  # otherwise the last words are still to be written
        self._over.set()
        self._threads[0].join(5)  # so that it does not restart faulthandler's clock
        faulthandler.cancel_dump_traceback_later()

    def _watch_self(self) -> None:
        shortest = min((limit for limit in self._limits if limit), default=0.0)
        if not shortest:
            return
        backup = max(self._limits) + EXTRA_SECONDS
        last = time.monotonic()
        while not self._over.wait(min(1.0, shortest / 4)):
            now = time.monotonic()
            if now - last > max(5.0, shortest / 2):  # the process was suspended
                phase, step, since, until = self._at
                self._at = (phase, step, since, until + now - last)
            last = now
            # By its descriptor, since sys.stderr of a notebook or a test is not a file.
            faulthandler.dump_traceback_later(backup, exit=True, file=STDERR)
            phase, step, since, until = self._at
            if now > until:
                self._end(
                    f"step {step}, {phase}: not finished after {now - since:.0f} s", first=True
                )

    def _watch_others(self) -> None:
        while peers.world_size() > 1 and not self._over.wait(LOOK_SECONDS):
            try:
                hung = peers.read_published(_TOPIC)
            except RuntimeError:
                return  # the coordinator is gone, and JAX ends this process
            for process, text in hung.items():
                self._end(f"{peers.process_name(process)} hangs at {text}")

    def _end(self, why: str, *, first: bool = False) -> None:
        """Write the last words, wait for the other processes to write theirs, and end with 124.

        Args:     first: this process has exceeded its limit.
        """
        if not self._ending.acquire(blocking=False):
            time.sleep(3600)  # the other thread ends the process
        try:
            phase, step, _, _ = self._at
            # In threads, since other processes may be stopped and the file system may hang.
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
        """Write the last words and the stacks; print the stacks if the folder is not writable."""
        with contextlib.suppress(OSError):
            self.write(exit_codes.EXIT_HANG, f"hang: {why}")
        stacks = self._folder / f"{peers.rank()}.stacks.txt"
        where = f"in {stacks}"
        try:
            with open(stacks, "a") as file:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                file.write(f"{now} {why}\n")
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as error:
            faulthandler.dump_traceback(STDERR)
            where = f"above, since {stacks} cannot be written ({error.strerror})"
        told = f"hang: {peers.process_name(peers.rank())}: {why}; stacks {where}"
        print(told, file=sys.stderr, flush=True)

    def _tell(self, where: str) -> None:
        """Notify the other processes, and stop waiting once all have reported."""
        try:
            peers.publish(_TOPIC, where)
            while peers.world_size() > max(len(peers.read_published(_TOPIC)), 1):
                time.sleep(0.1)
            time.sleep(0.5)  # they are writing their stacks
        except RuntimeError:
            pass  # the coordinator is gone, so no process can be notified
        self._over.set()

    def _ask_nccl(self) -> None:
        """Write NCCL's report on all ranks, and print its errors and warnings."""
        from jaxpar.runtime.gpus import nccl_ras

        file = self._folder / f"{peers.rank()}.nccl.txt"
        try:
            report = nccl_ras.status(REPORT_SECONDS - 1)
        except nccl_ras.NoAnswer as error:
            print(f"hang: {error}", file=sys.stderr, flush=True)
            return
        with contextlib.suppress(OSError):  # errors are printed anyway
            file.write_text(report)
        found = nccl_ras.what_is_wrong(report) or ["no rank is behind"]
        shown = "\n".join(f"    {line}" for line in found[:MAX_LINES_SHOWN])
        print(f"hang: NCCL ({file}):\n{shown}", file=sys.stderr, flush=True)

    def _collectives(self) -> None:
        """Write the collectives of a step in their order, which NCCL counts."""
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


def without_last_words() -> None:
    """Write no last words: another process writes the run's folder now."""
    global _current
    _current = None


def last_words(code: int, error: str) -> None:
    """Write why this process ends and where it was, if it has a watchdog."""
    if _current is not None and _current.run_dir.exists():
        _current.write(code, error)


def _start(work: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread
