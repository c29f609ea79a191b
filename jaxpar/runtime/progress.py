"""What a conversion tells the person waiting: bytes done and per second, and the memory it took."""

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rich.progress
from rich.console import Console

#: Seconds between two lines in a log.
LOG_EVERY = 10.0

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """Counts what has been converted, and the process's memory meanwhile."""

    def __init__(self, total: int, bar: rich.progress.Progress | None):
        self.total, self.done = total, 0
        self._bar, self._next = bar, time.monotonic() + LOG_EVERY
        self._task = None if bar is None else bar.add_task("", total=total)
        self._began = time.perf_counter()
        self._before = _reset_peak()

    def advance(self, num_bytes: int) -> None:
        """So many more bytes of weights are done."""
        self.done += num_bytes
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done)
        elif time.monotonic() >= self._next:
            self._next += LOG_EVERY
            print(f"{size(self.done)} of {size(self.total)}", file=sys.stderr, flush=True)

    def summary(self, largest: int) -> str:
        """What was done, how fast, and the memory that it took beside the largest tensor."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        memory = size(max(peak_memory() - self._before, 0))
        return (
            f"{size(self.done)} in {seconds:.1f} s, {size(self.done / seconds)}/s; memory grew by "
            f"{memory} (largest tensor {size(largest)})"
        )


@contextmanager
def meter(total: int) -> Iterator[Meter]:
    """A bar if stderr is a terminal, a line every `LOG_EVERY` seconds otherwise.

    Args:     total: bytes of weights on disk, in the published model's dtype.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Meter(total, None)
        return
    columns = (
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        yield Meter(total, bar)


def size(num_bytes: float) -> str:
    """A number of bytes as people read it: "1.24 GB"."""
    power = min(int(math.log10(max(num_bytes, 1)) // 3), 4)
    unit = ("bytes", "kB", "MB", "GB", "TB")[power]
    return f"{num_bytes / 1000**power:.{0 if power == 0 else 3 if power > 2 else 1}f} {unit}"


def peak_memory() -> int:
    """The most memory that this process has had in use, mapped files included, in bytes."""
    high = _status("VmHWM")
    return high or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reset_peak() -> int:
    """Start the peak anew where the system lets us; the memory in use now."""
    try:
        _RESET.write_text("5")
    except OSError:
        return peak_memory()
    return _status("VmRSS")


def _status(field: str) -> int:
    """A field of this process's status in bytes; 0 where there is none: gVisor has no peak, and
    systems but Linux no file."""
    if not _STATUS.is_file():
        return 0
    rows = (row.split() for row in _STATUS.read_text().splitlines())
    return next((int(row[1]) * 1024 for row in rows if row and row[0] == f"{field}:"), 0)
