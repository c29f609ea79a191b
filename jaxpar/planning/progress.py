"""Reports a plan's progress on stderr: thousands of GPUs take minutes."""

import sys
import time
from collections.abc import Callable

#: Called with a count and what is counted: (3000, "of 8,000 layouts predicted").
type Watch = Callable[[int, str], None]

#: Seconds between lines, and before the first.
EVERY = 5.0


def no_report(count: int, what: str) -> None:
    """Report nothing."""


def on_stderr() -> Watch:
    """Return a watch that prints a line to stderr every few seconds.

    stdout has only the plan, which may be JSON.
    """
    last = time.monotonic()

    def watch(count: int, what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            print(f"plan: {count:,} {what}", file=sys.stderr, flush=True)
            last = time.monotonic()

    return watch
