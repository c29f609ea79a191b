"""Exit codes, and the exceptions that end a run."""

import math

#: Exit codes that a scheduler can act on.
EXIT_OK, EXIT_ERROR, EXIT_CONFIG, EXIT_NUMERICS, EXIT_PREEMPTED, EXIT_HANG = 0, 1, 2, 17, 75, 124

#: As BSD's sysexits.h: an output that cannot be made, and an error of reading.
EXIT_NOT_STORED, EXIT_UNREADABLE = 73, 74

#: The exit code that shells report for a program ended by Ctrl-C.
EXIT_INTERRUPTED = 130


class RunError(Exception):
    """Ends a program with its code and a message, without a traceback."""

    code = EXIT_ERROR


class BadNumerics(Exception):
    """The loss or the gradient is non-finite, or spikes too often."""


class Spike(Exception):
    """The loss of a step is far above earlier losses, and the run must return to a checkpoint."""

    def __init__(self, step: int, text: str):
        self.step = step
        super().__init__(text)


def not_finite(values: dict[str, float]) -> list[str]:
    """Return each non-finite value, as "loss = nan", of a step whose update was skipped.

    That is so if the loss or the gradient is non-finite. A metric of a user's loss may be without.
    """
    if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
        return []
    return [f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)]
