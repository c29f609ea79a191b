"""Which process holds the others up.

Every process waits for the slowest in each step, so their step times are the same. What differs is
how long the host itself takes: data, Python, all but dispatching and waiting for the devices. There
a slow host shows; a slow GPU, while its host is quick, does not.
"""

import json
import statistics
from typing import Any

from jaxpar.runtime.processes import peers

_TOPIC = "timing"


def compare(host_seconds: float) -> dict[str, Any]:
    """Tell the others this process's time per step, and compare; once per logged interval.

    Args:     host_seconds: of one step, without dispatching and the wait for the devices.
    Returns:  in process 0, for the record of the interval; else, and with one process, nothing. Of
              a process that has not come as far, it is the interval before.
    """
    if peers.world_size() == 1:
        return {}
    peers.publish(_TOPIC, json.dumps(host_seconds))
    if peers.rank() != 0:
        return {}
    times = {i: json.loads(text) for i, text in peers.read_published(_TOPIC).items()}
    if len(times) < peers.world_size():
        return {}  # somebody has not come to its first yet
    slowest = max(times, key=lambda i: times[i])
    return {
        "host_seconds_median": statistics.median_low(times.values()),
        "host_seconds_slowest": times[slowest],
        "slowest": peers.process_name(slowest),
    }


def remark(record: dict[str, Any]) -> str | None:
    """A line about a process that takes a fifth of the step for itself, twice the median's time."""
    slow, usual = record.get("host_seconds_slowest", 0.0), record.get("host_seconds_median", 0.0)
    if slow < 0.2 * record.get("step_seconds", float("inf")) or slow < 2 * usual:
        return None
    return (
        f"{record['slowest']} is slow: {slow:.3f} s a step without its devices, others {usual:.3f}"
    )
