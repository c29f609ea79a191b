"""Answers --goodput: how often a run should save, and the share of its time that counts.

The closed form of Young and Daly: failures at a constant rate, saves that training waits for.

Source:   Young 1974 (A first order approximation to the optimum checkpoint interval); Daly 2006 (A
          higher order estimate of the optimum checkpoint interval for restart dumps), equations 13
          and 37.
"""

import math
from typing import Any

from rich.console import Console

from jaxpar.planning.options import GoodputOptions


def expected(interval: float, blocking: float, restart: float, between: float) -> float:
    """Return the expected share of the time that is work which counts. Exact.

    Args:     interval: seconds of work between two saves. blocking: seconds of a save. restart:
              seconds from a failure to the next step, in which further failures may come. between:
              mean seconds between failures.
    """
    try:
        segment = math.exp(restart / between) * math.expm1((interval + blocking) / between)
    except OverflowError:  # hundreds of failures in a restart
        return 0.0
    return interval / (between * segment)


def daly(blocking: float, between: float) -> float:
    """Return the seconds of work between two saves that waste the least.

    Young's sqrt(2 blocking between), to a higher order.
    """
    if blocking >= 2 * between:
        return between
    share = blocking / (2 * between)
    young = math.sqrt(2 * blocking * between)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - blocking


def answer(options: GoodputOptions, console: Console) -> dict[str, Any]:
    """Print the best time between saves with the expected goodput, and return the record."""
    gpus = options.gpus
    between = options.failure_hours * 3600 / gpus
    interval = daly(options.save_seconds, between)
    share = expected(interval, options.save_seconds, options.restart_seconds, between)
    console.print(
        f"{gpus:,} GPUs: a failure every {between / 3600:,.2f} h\n"
        f"best time between saves: {interval:,.0f} s (Daly)\n"
        f"expected goodput: {share:.1%}"
    )
    return {
        "gpus": gpus,
        "seconds_between_failures": between,
        "seconds_between_saves": interval,
        "goodput": share,
    }
