"""Says what a program does while a stage of its work takes long.

    with stage("compiling the train step"):
        program = lowered.compile()

On a terminal, a live line shows the stage, its time, and a bar if its steps are counted. Elsewhere,
a stage of more than FIRST seconds prints a line to standard error, and another one every EVERY
seconds: "compiling the train step: 10 s so far". Only process 0 shows stages.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxpar.config.printable import printable
from jaxpar.runtime import terminal

if TYPE_CHECKING:
    from rich.live import Live

#: Seconds until the first line about a stage, and between two lines.
FIRST, EVERY = 10.0, 30.0

#: Seconds between two looks at the stages.
LOOK_EVERY = 1.0

#: Seconds until a stage is in the live line, and columns of its bar.
SOON, BAR = 0.5, 30


class Stage:
    """A stage of a program's work. What it does can be changed while it runs."""

    def __init__(self, what: str, now: float, live_only: bool):
        self.what, self.detail, self.since = what, "", now
        self.live_only = live_only
        self.ordinary, self.told = False, -EVERY
        self._bar: tuple[int, int, str] | None = None

    def enter(self, what: str, *, ordinary: bool = False) -> None:
        """Begin another stage in place of this one.

        Args:     ordinary: one of many of its kind, such as a train step. Their lines are at least
                  EVERY seconds apart, even if each stage is a new one.
        """
        self.told = self.told if ordinary and self.ordinary else -EVERY
        self.what, self.detail, self.ordinary = what, "", ordinary
        self.since = time.monotonic()

    def at(self, detail: str) -> None:
        """Note where the stage is, for the next line: "step 7 of 100"."""
        self.detail = detail

    def count(self, done: int, total: int, text: str) -> None:
        """Show a bar of this length, and a text, while the stage is an ordinary one."""
        self._bar = done, total, text

    def line(self, now: float) -> str:
        """Return the line that is due; empty if none is."""
        if self.live_only or now - self.since < FIRST or now - self.told < EVERY:
            return ""
        self.told = now
        at = f", at {self.detail}" if self.detail else ""
        return f"{self.what}: {now - self.since:.0f} s so far{at}"

    def drawn(self, width: int) -> Any:
        """Return the live line, which rich draws in this many columns."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        seconds = time.monotonic() - self.since
        what = f"{self.what}{self.detail and f', at {self.detail}'}   {seconds:.0f} s"
        if self.ordinary and self._bar is not None:
            done, total, what = self._bar
        elif seconds < SOON:
            return ""
        text = Text(printable(what), no_wrap=True, overflow="ellipsis")
        grid = Table.grid(padding=(0, 2, 0, 0))
        room = min(BAR, width - len(text) - 3)
        if self._bar is not None and room > 3:
            grid.add_row(ProgressBar(self._bar[1], self._bar[0], width=room), text)
        else:
            grid.add_row(text)
        return grid


class Stages:
    """The current stages of a program, each within the one before it. Lines name the innermost."""

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._current: list[Stage] = []
        self._some = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None

    @contextmanager
    def stage(self, what: str, *, live_only: bool = False) -> Iterator[Stage]:
        """Run a block as a stage. Args:     live_only: without a terminal, print no line."""
        made = Stage(what, time.monotonic(), live_only)
        self._current.append(made)
        self._begin_live()
        if self._live is None:
            self._some.set()
        if self._live is None and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="stages", daemon=True)
            self._thread.start()
        try:
            yield made
        finally:
            self._current.remove(made)
            if not self._current:
                self._some.clear()
                self.end_live()

    def _begin_live(self) -> None:
        """Draw the live line from now on, if there is a terminal."""
        if self._live is not None or not _shows() or (screen := terminal.screen()) is None:
            return
        from rich.live import Live

        def line() -> Any:
            innermost = self._current[-1:]  # a copy: the block may end meanwhile
            return innermost[0].drawn(screen.width) if innermost else ""

        self._live = Live(get_renderable=line, console=screen, transient=True, refresh_per_second=2)
        self._live.start()

    def end_live(self) -> None:
        """Remove the live line, and show the cursor again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def count(self, done: int, total: int, text: str) -> None:
        """Show the progress of the innermost stage in the live line."""
        for one in self._current[-1:]:
            one.count(done, total, text)

    def look(self, now: float) -> None:
        """Show the line that is due, if any."""
        innermost = self._current[-1:]  # a copy: the block may end meanwhile
        for one in innermost:
            if line := one.line(now):
                self._show(line)

    def _watch(self) -> None:
        while True:
            self._some.wait()
            time.sleep(LOOK_EVERY)
            self.look(time.monotonic())


def _shows() -> bool:
    # Without the module, the program has no other processes.
    peers = sys.modules.get("jaxpar.runtime.processes.peers")
    return peers is None or peers.rank() == 0


def _to_stderr(line: str) -> None:
    if _shows():
        print(line, file=sys.stderr, flush=True)


_stages = Stages(_to_stderr)

#: Run a block as a stage of this program. Yields the `Stage`.
stage = _stages.stage
count, end_live = _stages.count, _stages.end_live
