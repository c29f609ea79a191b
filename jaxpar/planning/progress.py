"""How far a plan is, on stderr: thousands of GPUs have layouts for minutes."""

import sys
import time
from collections.abc import Callable

#: Called with how many of something there are so far: (3000, "of 8,000 layouts predicted").
type Watch = Callable[[int, str], None]

#: Seconds between two lines, and before the first.
EVERY = 5.0


def no_report(count: int, what: str) -> None:
    """Report nothing."""


def on_stderr() -> Watch:
    """A line on stderr every few seconds; none of a plan that is done sooner. stdout has the plan
    alone, which may be JSON."""
    last = time.monotonic()

    def watch(count: int, what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            print(f"plan: {count:,} {what}", file=sys.stderr, flush=True)
            last = time.monotonic()

    return watch
