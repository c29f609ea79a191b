"""Reasons to stop a run, and the exit code of each."""

import math
import signal
import threading
from types import FrameType
from typing import Any

#: Exit codes that a scheduler can act on.
EXIT_OK, EXIT_ERROR, EXIT_CONFIG, EXIT_NUMERICS, EXIT_PREEMPTED = 0, 1, 2, 17, 75


class RunError(Exception):
    """Ends a program with code 1 and one message that says all; a traceback would add nothing."""


class BadNumerics(Exception):
    """The loss or the gradient is no longer a number."""


class Spike(Exception):
    """The loss of a step lies far above those before it, and the run is to go back."""

    def __init__(self, step: int, text: str):
        self.step = step
        super().__init__(text)


def not_finite(values: dict[str, float]) -> list[str]:
    """Each value that is infinite or not a number, as "loss = nan"."""
    return [f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)]


class StopRequest:
    """Set by SIGTERM or Ctrl-C, so that the loop can save and leave. A second one ends at once.

    Use as a context manager: leaving it puts the earlier handlers back. Python delivers signals to
    the main thread alone, so elsewhere (a notebook's worker) it listens to nothing.
    """

    def __init__(self):
        self.received: str | None = None
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._earlier[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
