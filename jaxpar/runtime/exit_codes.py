"""Exit codes, and the exceptions that end a run."""

import math

#: Exit codes that a scheduler can act on.
EXIT_OK, EXIT_ERROR, EXIT_CONFIG, EXIT_NUMERICS, EXIT_PREEMPTED, EXIT_HANG = 0, 1, 2, 17, 75, 124

#: The exit code that shells report for a program ended by Ctrl-C.
EXIT_INTERRUPTED = 130


class RunError(Exception):
    """Ends a program with code 1 and a message, without a traceback."""


class BadNumerics(Exception):
    """The loss or the gradient is non-finite, or spikes too often."""


class Spike(Exception):
    """The loss of a step is far above earlier losses, and the run must return to a checkpoint."""

    def __init__(self, step: int, text: str):
        self.step = step
        super().__init__(text)


def not_finite(values: dict[str, float]) -> list[str]:
    """Return each non-finite value, as "loss = nan"."""
    return [f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)]
