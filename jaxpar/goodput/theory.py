"""Closed forms of the simple case: failures of a Poisson process, saves that block, one place.

Source:   Young 1974 (A first order approximation to the optimum checkpoint interval); Daly 2006 (A
          higher order estimate of the optimum checkpoint interval for restart dumps), equations 13
          and 37.
"""

import math


def goodput(interval: float, blocking: float, restart: float, between: float) -> float:
    """Return the expected share of the time that is work which counts. Exact.

    Args:     interval: seconds of work between two saves. blocking: seconds of a save. restart:
              seconds from a failure until work goes on, in which failures come as well. between:
              mean seconds between failures.
    """
    segment = math.exp(restart / between) * math.expm1((interval + blocking) / between)
    return interval / (between * segment)


def young(blocking: float, between: float) -> float:
    """Return the seconds of work between two saves that waste the least, to first order."""
    return math.sqrt(2 * blocking * between)


def daly(blocking: float, between: float) -> float:
    """Return the same to a higher order."""
    if blocking >= 2 * between:
        return between
    share = blocking / (2 * between)
    return young(blocking, between) * (1 + math.sqrt(share) / 3 + share / 9) - blocking
