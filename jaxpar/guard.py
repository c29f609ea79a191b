"""Reasons to stop a run, and the exit code of each."""

import math
import os
import signal
import threading
from types import FrameType
from typing import Any

#: Exit codes that a scheduler can act on.
EXIT_OK, EXIT_ERROR, EXIT_CONFIG, EXIT_NUMERICS, EXIT_PREEMPTED, EXIT_HANG = 0, 1, 2, 17, 75, 124

#: What a shell reports of a program that Ctrl-C ended.
EXIT_INTERRUPTED = 130


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

    With several processes, SIGTERM is JAX's: it listens since the processes have met, passes word
    on to all of them, and they agree on the step after the furthest that any has reached. A handler
    of Python's would take that away. Ctrl-C becomes a SIGTERM, and only its second ends at once.
    """

    def __init__(self, several: bool = False):
        """Args:     several: there are other processes, and they have met."""
        self.received: str | None = None
        self._several, self._agreed = several, False
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._several else (signal.SIGTERM, signal.SIGINT):
                self._earlier[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def due(self) -> bool:
        """Whether to save and leave now: the same in every process, and true from then on.

        With several of them, it must be asked after each step.
        """
        if not self._several:
            return self.received is not None
        from jaxpar import processes  # here, since programs that start no JAX read this file

        if not self._agreed and processes.stop_is_agreed():
            self._agreed, self.received = True, self.received or "SIGTERM"
        return self._agreed

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
