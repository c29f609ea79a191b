"""Answers --goodput: how often a run should save, and the share of its time that counts.

The closed form of Young and Daly: failures at a constant rate, saves that training waits for.

Source:   Young 1974 (A first order approximation to the optimum checkpoint interval); Daly 2006 (A
          higher order estimate of the optimum checkpoint interval for restart dumps), equations 13
          and 37.
"""

import argparse
import math
from typing import Any

from rich.console import Console

from jaxpar.config import ConfigError

#: Option, default, and text of --help. The failures are those of Llama 3 405B without planned
#: stops: 419 on 16,384 H100s in 54 days (2407.21783, table 5).
OPTIONS: dict[str, tuple[float, str]] = {
    "failure-hours": (50_000.0, "with --goodput: mean hours between failures of a GPU"),
    "save-seconds": (1.0, "with --goodput: seconds that training waits for a save"),
    "restart-seconds": (
        240.0,
        "with --goodput: seconds from a failure to the next step, without lost work",
    ),
}
MIN, MAX = 1e-3, 1e9


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --goodput and its options."""
    told = "best time between saves, and the share of steps that count; takes no CONFIG"
    parser.add_argument("--goodput", action="store_true", help=told)
    for name, (default, told) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=float, metavar="X", help=f"{told} ({default:g})")


def check(options: argparse.Namespace) -> None:
    """Check the options of --goodput, and fill in those that are not set.

    Raises:   ConfigError for a value out of range, or one that is not used.
    """
    for name, (default, _) in OPTIONS.items():
        key, option = name.replace("-", "_"), f"--{name}"
        value = getattr(options, key)
        if value is None:
            setattr(options, key, default)
        elif not options.goodput:
            raise ConfigError(option, value, "is used only with --goodput", f"remove {option}")
        elif not MIN <= value <= MAX:
            rule = f"must be from {MIN:g} to {MAX:g}"
            raise ConfigError(option, value, rule, f"use {option} {default:g}")


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


def answer(options: argparse.Namespace, gpus: int, console: Console) -> dict[str, Any]:
    """Print the best time between saves with the expected goodput, and return the record."""
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
