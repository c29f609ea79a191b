"""Says what a program does while a stage of its work takes long.

    with stage("compiling the train step"):
        program = lowered.compile()

A stage of more than FIRST seconds prints a line to standard error, and another one every EVERY
seconds: "compiling the train step: 10 s so far". Only process 0 prints.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds until the first line about a stage, and between two lines.
FIRST, EVERY = 10.0, 30.0

#: Seconds between two looks at the stages.
LOOK_EVERY = 1.0


class Stage:
    """A stage of a program's work. What it does can be changed while it runs."""

    def __init__(self, what: str, now: float):
        self.what, self.detail, self.since = what, "", now
        self.ordinary, self.told = False, -EVERY

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

    def line(self, now: float) -> str:
        """Return the line that is due; empty if none is."""
        if now - self.since < FIRST or now - self.told < EVERY:
            return ""
        self.told = now
        at = f", at {self.detail}" if self.detail else ""
        return f"{self.what}: {now - self.since:.0f} s so far{at}"


class Stages:
    """The current stages of a program, each within the one before it. Lines name the innermost."""

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._current: list[Stage] = []
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def stage(self, what: str) -> Iterator[Stage]:
        """Run a block as a stage."""
        made = Stage(what, time.monotonic())
        self._current.append(made)
        self._some.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="stages", daemon=True)
            self._thread.start()
        try:
            yield made
        finally:
            self._current.remove(made)
            if not self._current:
                self._some.clear()

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


def _to_stderr(line: str) -> None:
    # Without the module, the program has no other processes.
    peers = sys.modules.get("jaxpar.runtime.processes.peers")
    if peers is None or peers.rank() == 0:
        print(line, file=sys.stderr, flush=True)


_stages = Stages(_to_stderr)

#: Run a block as a stage of this program. Yields the `Stage`.
stage = _stages.stage
