"""Start, watch and end the processes of a run on this host, without leaving orphans.

Each child has its own process group, so that Ctrl-C in a terminal reaches only the parent. The
kernel kills the children when the parent dies for any reason (Linux's PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import functools
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from jaxpar.config import declared
from jaxpar.config.declared import Count
from jaxpar.runtime import exit_codes
from jaxpar.runtime.signals import heeded

#: Seconds between checks of the children.
POLL_SECONDS = 0.05

_PR_SET_PDEATHSIG = 1

#: Most bytes of the last words of a process.
MAX_WORDS = 1 << 20

#: Signals from outside, which are unrelated to what the run was doing.
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Clock(Protocol):
    """The module `time`, or what stands for it."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why an attempt ended."""

    rank: int
    code: int
    """The run's exit code; 128 + number for a signal."""
    step: int | None
    error: str

    def __str__(self) -> str:
        if self.error.startswith(f"hang: process {self.rank} ended"):
            return self.error
        where = "" if self.step is None else f" at step {self.step}"
        return f"process {self.rank} ended with code {self.code}{where}: {self.error}"

    def same_as(self, other: "Failure | None") -> bool:
        """Return whether step and error are those of `other`. Never true for outside signals."""
        if other is None or self.step is None or self.code in {128 + number for number in OUTSIDE}:
            return False
        # Ports and addresses differ between attempts.
        plain = lambda text: re.sub(r"0x[0-9a-f]+|\d+", "#", text)  # noqa: E731
        mine, theirs = (self.code, self.step), (other.code, other.step)
        return mine == theirs and plain(self.error) == plain(other.error)


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has written when it ended (`watchdog.last_words`)."""

    time: float
    """By `time.time`."""
    step: Count | None = None
    error: str = "see its output"


def end_with_parent(parent: int, libc: ctypes.CDLL | None = None) -> None:
    """Have the kernel kill this process when its parent ends. Args: parent: its pid."""
    (libc or ctypes.CDLL(None)).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended
        os._exit(exit_codes.EXIT_ERROR)


class Child(subprocess.Popen):
    """A process of a run, or one that serves it."""

    def end(self) -> None:
        """Kill it and all that it started, and reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def start(command: Sequence[str], env: Mapping[str, str], log: Path | None) -> Child:
    """Start a process. Args: log: file to append its output to; None: inherit stdout and stderr."""
    before_it_runs = functools.partial(end_with_parent, os.getpid(), ctypes.CDLL(None))
    with contextlib.ExitStack() as stack:
        out = None if log is None else stack.enter_context(open(log, "ab"))
        return Child(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=None if out is None else subprocess.STDOUT,
            process_group=0,
            preexec_fn=before_it_runs,
        )


def start_talking(command: Sequence[str], env: Mapping[str, str]) -> Child:
    """Start a process whose standard input and output are pipes of text; its errors are dropped."""
    return Child(
        command,
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=functools.partial(end_with_parent, os.getpid(), ctypes.CDLL(None)),
        text=True,
    )


def failure_of(ended: Mapping[int, int], words: Mapping[int, LastWords]) -> Failure:
    """Return the failure that caused the others.

    Args:     ended: code of each process that has ended by itself, in that order, with at least one
              failure. words: last words by rank, if they left any.
    """
    bad = [rank for rank, code in ended.items() if code not in (0, exit_codes.EXIT_PREEMPTED)]
    for code in (exit_codes.EXIT_CONFIG, exit_codes.EXIT_NUMERICS):
        for rank in bad:
            if ended[rank] == code:
                return _failure(rank, code, words)
    outside = [rank for rank in bad if -ended[rank] in OUTSIDE]
    if outside:
        return _failure(outside[0], ended[outside[0]], words)
    spoken = sorted((words[rank].time, rank) for rank in bad if rank in words)
    preempted = [rank for rank, code in ended.items() if code == exit_codes.EXIT_PREEMPTED]
    rank = spoken[0][1] if spoken else [*bad, *preempted, *ended][0]
    return _failure(rank, ended[rank], words)


def why_final(failure: Failure, previous: Failure | None, spent: int, restarts: int) -> str:
    """Return why a failed run does not start again; empty if it does.

    Args:     previous: the failure before. spent: restarts since the last new checkpoint, of at
              most `restarts`.
    """
    if failure.code in (exit_codes.EXIT_CONFIG, exit_codes.EXIT_NUMERICS):
        return "it would fail again"
    if failure.same_as(previous):
        return f"step {failure.step} has failed twice with the same error"
    if spent >= restarts:
        return f"no new checkpoint after {spent} restarts"
    return ""


def _failure(rank: int, code: int, words: Mapping[int, LastWords]) -> Failure:
    said = words.get(rank) if code >= 0 else None
    stopped = code == exit_codes.EXIT_PREEMPTED
    error = "the others did not stop with it" if stopped else "see its output"
    if code == exit_codes.EXIT_OK:  # which would say that the run is complete
        error = f"hang: process {rank} ended with code 0, and the others did not end"
        code, said = exit_codes.EXIT_HANG, None
    error = f"killed by {signal.Signals(-code).name}" if code < 0 else error
    return Failure(
        rank=rank,
        code=code if code >= 0 else 128 - code,
        step=said.step if said else None,
        error=(said.error if said else error).partition("\n")[0],
    )


def last_words(run_dir: Path, since: float) -> dict[int, LastWords]:
    """Return the last words in RUN/ranks since a time (of `time.time`), by rank."""
    found = {}
    for file in sorted((run_dir / "ranks").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            words = declared.read(LastWords, file, max_bytes=MAX_WORDS)
            if words.time >= since:
                found[int(file.stem)] = words
    return found


def tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (64 << 10)))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
    return ""


def on_signals(act: Callable[[signal.Signals], None]) -> None:
    """Call `act` on the signals that stop a program."""
    for number in heeded():
        signal.signal(number, lambda received, _: act(signal.Signals(received)))


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delay the signals that stop a program to the end of the block. In the main thread only.

    A signal during the start of a process would leave it running, unknown to its parent.
    """
    came: list[int] = []
    note = lambda number, _: came.append(number)  # noqa: E731
    earlier = {number: signal.signal(number, note) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if not came:
        return
    handler = earlier[signal.Signals(came[0])]
    if callable(handler):
        # Called here, since Python may run a handler inside a callback of the garbage collector
        # (JAX has one), which drops a KeyboardInterrupt.
        handler(came[0], None)
    else:
        signal.raise_signal(came[0])
