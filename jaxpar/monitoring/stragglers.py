"""Finds the process that slows down all others.

In each step, every process waits for the slowest one, so step times are equal. Host times differ:
data loading and Python, without dispatch and waiting for the devices. They reveal a slow host, but
not a slow GPU.
"""

import json
import statistics
from typing import Any

from jaxpar.runtime.processes import peers

_TOPIC = "timing"


def compare(host_seconds: float) -> dict[str, Any]:
    """Publish this process's host time per step, and compare; once per logged interval.

    Args:     host_seconds: of one step, without dispatch and waiting for the devices.
    Returns:  in process 0 of several, fields for the record of the interval; otherwise empty. A
              process that lags behind counts with its previous interval.
    """
    if peers.world_size() == 1:
        return {}
    peers.publish(_TOPIC, json.dumps(host_seconds))
    if peers.rank() != 0:
        return {}
    times = {i: json.loads(text) for i, text in peers.read_published(_TOPIC).items()}
    if len(times) < peers.world_size():
        return {}  # some process has not reached its first interval yet
    slowest = max(times, key=lambda i: times[i])
    return {
        "host_seconds_median": statistics.median_low(times.values()),
        "host_seconds_slowest": times[slowest],
        "slowest": peers.process_name(slowest),
    }


def remark(record: dict[str, Any]) -> str | None:
    """Warn of a process whose host time exceeds a fifth of the step and twice the median."""
    slow, usual = record.get("host_seconds_slowest", 0.0), record.get("host_seconds_median", 0.0)
    if slow < 0.2 * record.get("step_seconds", float("inf")) or slow < 2 * usual:
        return None
    return f"{record['slowest']} is slow: {slow:.3f} s of host time per step, median {usual:.3f} s"
