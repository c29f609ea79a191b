"""Losses of hosts in RUN/events.jsonl, and the time that each took.

Launchers of several hosts record when a generation takes its first step
(`runtime/processes/hosts/progress.py`), and which hosts the one before had lost.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

from jaxpar.monitoring.goodput import GENERATION


@dataclass(frozen=True)
class HostLoss:
    """One loss of hosts."""

    hosts: tuple[str, ...]
    seconds: float
    """From the last sign of life of the lost hosts to the end of the next step."""
    step: int
    """That step."""


def host_losses(events: Iterable[dict[str, Any]]) -> list[HostLoss]:
    """Return the losses of hosts, in order. Args: events: from `goodput.read_events`."""
    found = []
    for event in events:
        lost, step = event.get("lost"), event.get("step")
        silent, seconds = event.get("silent"), event.get("seconds")
        if event["event"] != GENERATION or not isinstance(lost, list) or not lost:
            continue
        if isinstance(step, int) and _is_time(silent) and _is_time(seconds):
            found.append(HostLoss(tuple(map(str, lost)), silent + seconds, step))
    return found


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float)


def described(losses: list[HostLoss]) -> str:
    """Describe losses in a line; empty if there were none."""
    if not losses:
        return ""
    seconds = [loss.seconds for loss in losses]
    times = "once" if len(losses) == 1 else f"{len(losses)} times"
    text = f"hosts lost {times}: {sum(seconds):.1f} s to the next steps"
    return text if len(losses) == 1 else f"{text}, median {statistics.median(seconds):.1f} s"
