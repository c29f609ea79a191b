"""Profiler traces made by hand: the protobuf that JAX writes, from plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

HOST = "/host:CPU"


@dataclass
class Event:
    """Start and duration in nanoseconds; stats are numbers or texts."""

    name: str
    start: int
    duration: int
    stats: dict[str, int | str] = field(default_factory=dict)


type Planes = dict[str, dict[str, Sequence[Event]]]


def write(path: Path, planes: Planes) -> Path:
    """Write planes of lines of events as a .xplane.pb."""
    text = "\n".join(_plane(name, lines) for name, lines in planes.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


def _plane(name: str, lines: dict[str, Sequence[Event]]) -> str:
    events: dict[str, int] = {}
    stats: dict[str, int] = {}
    number = lambda table, key: table.setdefault(key, len(table) + 1)  # noqa: E731
    parts = []
    for at, (line, its) in enumerate(lines.items()):
        inside = "".join(
            f"events {{ metadata_id: {number(events, e.name)} offset_ps: {e.start * 1000} "
            f"duration_ps: {e.duration * 1000} "
            + "".join(_stat(number(stats, key), value) for key, value in e.stats.items())
            + "}\n"
            for e in its
        )
        parts.append(f"lines {{ id: {at} name: {_quoted(line)}\n{inside}}}\n")
    for kind, table in (("event", events), ("stat", stats)):
        parts += [
            f"{kind}_metadata {{ key: {n} value {{ id: {n} name: {_quoted(key)} }} }}\n"
            for key, n in table.items()
        ]
    return f"planes {{ name: {_quoted(name)}\n{''.join(parts)}}}"


def _stat(number: int, value: Any) -> str:
    known = f"int64_value: {value}" if isinstance(value, int) else f"str_value: {_quoted(value)}"
    return f"stats {{ metadata_id: {number} {known} }} "


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def launches(
    device: int, module: str, runs: Sequence[tuple[int, int, Sequence[int]]]
) -> list[Event]:
    """The host's events of a device's thread.

    Args:     runs: (start, duration, correlation ids of the launches) of each execution.
    """
    events = []
    for start, duration, ids in runs:
        events.append(Event(f"{module}:XLA GPU module", start, duration))
        events += [
            Event("cuLaunchKernelEx", start + 1 + n, 1, {"correlation_id": i, "device_id": device})
            for n, i in enumerate(ids)
        ]
    return events
