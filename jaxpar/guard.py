"""Reasons to stop a run, and the exit code of each."""

import math
import signal
from types import FrameType

#: Exit codes that a scheduler can act on.
EXIT_OK, EXIT_ERROR, EXIT_CONFIG, EXIT_NUMERICS, EXIT_PREEMPTED = 0, 1, 2, 17, 75


class BadNumerics(Exception):
    """The loss or the gradient is no longer a number."""


def check_finite(step: int, values: dict[str, float]) -> None:
    """Raises:   BadNumerics when a measured value is infinite or not a number."""
    bad = [f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise BadNumerics(f"step {step + 1}: {', '.join(bad)}. The last checkpoint is untouched.")


class StopRequest:
    """Set by SIGTERM or Ctrl-C, so that the loop can save and leave. A second one ends at once."""

    def __init__(self):
        self.received: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
