"""Limits that several fields and options share, and ranges of options."""

from jaxpar.components.ranges import MAX_INT, Range

__all__ = ["MAX_INT", "Range"]

#: Most simulated devices: more take minutes to start, or do not start.
MAX_CPU_DEVICES = 4096

#: Largest size of a mesh axis.
MAX_AXIS = 1 << 20

#: Most tokens in a row: positions are exact in float32 up to here.
MAX_SEQUENCE = 1 << 24

#: Most seconds of a wait or a limit: 115 days.
MAX_SECONDS = 10_000_000

#: Ranges that several programs share.
STEP = Range(0, MAX_INT, 1)
DEVICES = Range(1, MAX_CPU_DEVICES, 1)
TOKEN_ID = Range(0, MAX_INT, 0)
REPEATS = Range(1, 100_000, 15)
