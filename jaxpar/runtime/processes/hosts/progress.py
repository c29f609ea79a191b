"""How far a run has come: its latest checkpoint, and the first step of a generation.

The step is seen in RUN/events.jsonl, reported, and recorded there.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from jaxpar.runtime.files import json_lines
from jaxpar.runtime.files.append import Lines
from jaxpar.runtime.processes.children import Clock
from jaxpar.runtime.processes.hosts.generations import Generation

#: The file of `jaxpar.monitoring.goodput`, and two of its events.
EVENTS_FILE, FIRST_STEP, GENERATION = "events.jsonl", "first step", "generation"

#: Seconds between two looks at the file.
LOOK_SECONDS = 0.25


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the latest complete checkpoint, by its folder name; -1 if none.

    Also of shards, if hosts share no folder (`jaxpar.stores.shards`).
    """
    places = "checkpoints/*", "shards/*/checkpoints/*"
    names = [p.name for place in places for p in run_dir.glob(place) if p.name.isdigit()]
    return max(map(int, names), default=-1)


class HostProgress:
    """Waits for the first step of a generation that has just started."""

    def __init__(self, run_dir: Path, over_since: float | None, clock: Clock = time):
        """Args:     over_since: when the generation before was known to be over here."""
        self._file, self._looked, self._clock = run_dir / EVENTS_FILE, float("-inf"), clock
        self._over_since, self._began = over_since, clock.monotonic()
        self._at = self._file.stat().st_size if self._file.is_file() else 0

    def first_step(self) -> int | None:
        """Return the first step that the generation has taken, once it has."""
        if self._clock.monotonic() - self._looked < LOOK_SECONDS:
            return None
        self._looked = self._clock.monotonic()
        with contextlib.suppress(OSError), open(self._file, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                event = json_lines.parse(line) or {}
                if event.get("event") == FIRST_STEP and isinstance(event.get("step"), int):
                    return int(event["step"])
        return None

    def told(self, generation: Generation, step: int | None) -> str:
        """Describe the first step, and record it if its number is known: on the first host."""
        now = self._clock.monotonic()
        seconds = now - (self._began if self._over_since is None else self._over_since)
        since = "its start" if self._over_since is None else "the last one was over"
        if step is not None:
            self._record(generation, step, seconds)
        which = "the first step" if step is None else f"step {step}"
        text = f"generation {generation.number}: {which} is done, {seconds:.1f} s after {since}"
        if generation.lost and generation.silent:
            total = seconds + generation.silent
            text += f", and {total:.1f} s after the last sign of life of {generation.lost[0]}"
        return text

    def _record(self, generation: Generation, step: int, seconds: float) -> None:
        """Append an event of the generation, of no attempt of a process."""
        told: dict[str, Any] = {
            "event": GENERATION,
            "attempt": 0,
            "age": 0.0,
            "time": self._clock.time(),
        }
        told |= {"generation": generation.number}
        told |= {"hosts": list(generation.members)}
        told |= {"lost": list(generation.lost), "why": generation.why, "step": step}
        told |= {"silent": generation.silent, "seconds": round(seconds, 3)}
        with contextlib.suppress(OSError):
            file = Lines(self._file)
            file.write(json.dumps(told) + "\n")
            file.close()
