"""Progress of `prepare`: none, a bar on a terminal, or lines in a log."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxpar.runtime.progress import Bar, bar


class PreparationProgress:
    """Shows the progress in a bar; without one, shows nothing."""

    def __init__(self, shown: Bar | None = None):
        self._shown = shown

    def log(self, line: str) -> None:
        """Report a line about a new step."""
        if self._shown is not None:
            self._shown.log(line)

    def advance(self, position: int, total: int, num_tokens: int) -> None:
        """Report the input bytes read, the total, and the tokens written."""
        if self._shown is not None:
            self._shown.show(position, total, f"{num_tokens:,} tokens")


@contextmanager
def console_progress() -> Iterator[PreparationProgress]:
    """Yield a progress bar if stderr is a terminal, and log lines otherwise."""
    with bar() as shown:
        yield PreparationProgress(shown)
