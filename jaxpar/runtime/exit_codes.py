"""Reasons to stop a run, and the exit code of each."""

import math

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
    """Each non-finite value, as "loss = nan"."""
    return [f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)]
