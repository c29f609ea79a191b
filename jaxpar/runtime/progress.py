"""Progress of what reads or writes many bytes, and the memory that a conversion uses."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.runtime import terminal
from jaxpar.runtime.units import duration, size

if TYPE_CHECKING:
    from rich.progress import Progress

#: Seconds between two log lines.
LOG_EVERY = 10.0

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Bar:
    """Bytes done, as a bar on a terminal, or as a line in a log every LOG_EVERY seconds."""

    def __init__(self, drawn: "Progress | None"):
        self._drawn, self._next = drawn, time.monotonic() + LOG_EVERY
        self._task = None if drawn is None else drawn.add_task("", total=None, text="")
        #: Time and bytes when the first bytes were done.
        self._began: tuple[float, int] | None = None

    def log(self, line: str) -> None:
        """Print a line, above the bar."""
        if self._drawn is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._drawn.console.print(line, highlight=False, markup=False)

    def show(self, done: int, total: int, text: str = "") -> None:
        """Show how many bytes of all are done, and a text."""
        if self._drawn is not None and self._task is not None:
            self._drawn.update(self._task, completed=done, total=total, text=text)
            return
        now = time.monotonic()
        if self._began is None or done < self._began[1]:
            self._began = now, done
        if now >= self._next:
            self._next = now + LOG_EVERY
            began, before = self._began
            left = (total - done) * (now - began) / (done - before) if done > before else 0.0
            parts = [
                f"{size(done)} of {size(total)}",
                text,
                f"{duration(left)} left" if left else "",
            ]
            self.log(", ".join(filter(None, parts)))


class Meter:
    """Counts the converted bytes and the memory of the process."""

    def __init__(self, total: int, shown: Bar):
        self.total, self.done = total, 0
        self._shown, self._began = shown, time.perf_counter()
        self._before = reset_peak()

    def advance(self, num_bytes: int) -> None:
        """Count more bytes of weights as done."""
        self.done += num_bytes
        self._shown.show(self.done, self.total)

    def summary(self, largest: int) -> str:
        """Return the bytes, the speed, the memory growth and the size of the largest tensor."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        memory = size(max(peak_memory() - self._before, 0))
        return (
            f"{size(self.done)} in {seconds:.1f} s, {size(self.done / seconds)}/s; memory grew by "
            f"{memory} (largest tensor {size(largest)})"
        )


@contextmanager
def bar() -> Iterator[Bar]:
    """Show a bar if stderr is a terminal, and lines otherwise."""
    if not terminal.is_terminal(sys.stderr):
        yield Bar(None)
        return
    from rich import progress

    columns = (
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TextColumn("{task.fields[text]}"),
        progress.TimeRemainingColumn(),
    )
    screen = terminal.screen()
    console = screen or terminal.console(stderr=True)
    with progress.Progress(
        *columns, console=console, transient=True, redirect_stdout=screen is not None
    ) as drawn:
        yield Bar(drawn)


@contextmanager
def meter(total: int) -> Iterator[Meter]:
    """Show the progress of a conversion.

    Args:     total: bytes of weights on disk, in the published model's dtype.
    """
    with bar() as shown:
        yield Meter(total, shown)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes, including mapped files."""
    high = _status("VmHWM")
    return high or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> int:
    """Reset the peak if the system allows it, and return the memory in use."""
    try:
        _RESET.write_text("5")
    except OSError:
        return peak_memory()
    return _status("VmRSS")


def _status(field: str) -> int:
    """Return a field of this process's status in bytes, or 0 if it does not exist: gVisor has no
    peak, and only Linux has the file."""
    if not _STATUS.is_file():
        return 0
    rows = (row.split() for row in _STATUS.read_text().splitlines())
    return next((int(row[1]) * 1024 for row in rows if row and row[0] == f"{field}:"), 0)
