"""Progress of `prepare`: none, a bar on a terminal, or lines in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import rich.progress

from jaxpar.runtime import terminal
from jaxpar.runtime.units import size

#: Seconds between two log lines.
LOG_EVERY = 10.0


class PreparationProgress:
    """Shows nothing. Base class of the others."""

    def log(self, line: str) -> None:
        """Report a line about a new step."""

    def advance(self, position: int, total: int, num_tokens: int) -> None:
        """Report the input bytes read, the total, and the tokens written."""


class LogProgress(PreparationProgress):
    """Prints a line to stderr every `LOG_EVERY` seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LOG_EVERY

    def log(self, line: str) -> None:
        """Print the line."""
        print(line, file=sys.stderr, flush=True)

    def advance(self, position: int, total: int, num_tokens: int) -> None:
        """Print a line when one is due."""
        if time.monotonic() >= self._next:
            self._next += LOG_EVERY
            self.log(f"read {size(position)} of {size(total)}, {num_tokens:,} tokens")


class BarProgress(PreparationProgress):
    """Shows a progress bar on the terminal."""

    def __init__(self, bar: rich.progress.Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, tokens="")

    def log(self, line: str) -> None:
        """Print the line above the bar."""
        self._bar.console.print(line, highlight=False, markup=False)

    def advance(self, position: int, total: int, num_tokens: int) -> None:
        """Move the bar."""
        tokens = f"{num_tokens:,} tokens"
        self._bar.update(self._task, completed=position, total=total, tokens=tokens)


@contextmanager
def console_progress() -> Iterator[PreparationProgress]:
    """Yield a progress bar if stderr is a terminal, and log lines otherwise."""
    console = terminal.console(stderr=True)
    if not console.is_terminal:
        yield LogProgress()
        return
    columns = (
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TextColumn("{task.fields[tokens]}"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        yield BarProgress(bar)
