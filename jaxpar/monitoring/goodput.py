"""Goodput: where a run's time went, over all its attempts, recorded in RUN/events.jsonl.

Every attempt appends to the file; no line is changed. Time within an attempt is measured with a
monotonic clock. The wall clock is only used for the time between two attempts; if it was set back
in between, that time counts as 0.

Launchers of several hosts record there when a generation takes its first step
(`runtime/processes/hosts/trainers.py`), and which hosts the one before had lost.
"""

import functools
import json
import os
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import jax
import msgspec
from msgspec import Meta

from jaxpar.runtime.files import json_lines
from jaxpar.runtime.files.append import Lines

#: When the start-up began, by `time.perf_counter`, if it was not when this process started.
_began: float | None = None


class StartUp:
    """The phases of the start-up, in the order in which they ended.

    The first phase covers everything before: Python, imports, and JAX's devices.
    """

    def __init__(self) -> None:
        #: Whether the train step was read from the compilation cache.
        self.from_cache = False
        self.seconds: dict[str, float] = {"python and devices": process_age()}
        self._last = time.perf_counter()

    def ended(self, part: str) -> None:
        """Count the time since the end of the last phase as `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"first step done after {sum(self.seconds.values()):.1f} s: {parts}"


def begin_now() -> None:
    """Let the start-up begin now: for a run in a process that did something else before."""
    global _began
    _began = time.perf_counter()


def process_age() -> float:
    """Return the seconds since this process started, or since `begin_now` was called; 0 if the
    system does not report it."""
    if _began is not None:
        return time.perf_counter() - _began
    try:
        with open("/proc/self/stat") as file:
            started = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


EVENTS_FILE = "events.jsonl"

#: An event that launchers of several hosts record (`runtime/processes/hosts/trainers.py`).
GENERATION = "generation"

#: What a process does at any moment. Only "step" counts as goodput.
PARTS = ("init", "compile", "restore", "step", "data wait", "evaluation", "save wait", "profile")

#: The part that each phase of the start-up (`StartUp`) counts as; all others count as "init".
OF_STARTUP = {"compilation": "compile", "checkpoint": "restore"}

#: Larger than any duration or time of day: a line with a larger value is damaged.
MAX_SECONDS = 1e12

#: Seconds between two records of the time: the most that a killed process loses.
RECORD_EVERY = 30.0


class Recorder:
    """Writes the events of one attempt, in process 0. Events may come from any thread.

    Use as a context manager: on exit, it records how the attempt ended.
    """

    def __init__(self, run_dir: Path):
        """Start an attempt in a run's folder, which must exist."""
        path = run_dir / EVENTS_FILE if jax.process_index() == 0 else Path(os.devnull)
        attempt = 1 + sum(event.get("event") == "start" for event in read_events(run_dir))
        self._file = Lines(path)
        self._lock, self._attempt = threading.Lock(), attempt
        self._spent: dict[str, float] = defaultdict(float)
        self._part, self._since = "init", time.perf_counter()
        self._step, self._recorded = 0, time.perf_counter()
        age = process_age()
        # If the system does not report the age of the process, the attempt starts now.
        self._born = time.perf_counter() - age
        self.event("start", devices=jax.device_count(), processes=jax.process_count())

    def event(self, name: str, **more: Any) -> None:
        """Append an event: its name, the attempt, the age of the process, the time of day."""
        age = round(time.perf_counter() - self._born, 3)
        record = {"event": name, "attempt": self._attempt, "age": age, "time": time.time()}
        with self._lock:
            self._file.write(json.dumps(record | more) + "\n")

    def started(self, step: int, seconds: dict[str, float]) -> None:
        """Record that training starts from `step`, after a start-up of `seconds` by phase."""
        for part, spent in seconds.items():
            self._spent[OF_STARTUP.get(part, "init")] += spent
        self._part, self._since = "step", time.perf_counter()
        self.goes_on_from(step)

    def goes_on_from(self, step: int) -> None:
        """Record that training continues after `step`; earlier records beyond it are lost work."""
        self._write()
        self._step = step
        self.event("from", step=step)

    def now(self, part: str) -> None:
        """Count time as `part` from now on."""
        moment = time.perf_counter()
        self._spent[self._part] += moment - self._since
        self._part, self._since = part, moment

    def done(self, step: int) -> None:
        """Note that `step` steps are done; record the time if it is due."""
        if time.perf_counter() - self._recorded > RECORD_EVERY:
            self.record(step)

    def record(self, step: int) -> None:
        """Record the time so far, after `step` steps."""
        self.now(self._part)
        self._write(step)

    def _write(self, step: int | None = None) -> None:
        spent = {part: round(seconds, 6) for part, seconds in self._spent.items() if seconds}
        step = self._step if step is None else step
        if spent:
            self.event("time", steps=[self._step, step], seconds=spent)
        self._spent.clear()
        self._step, self._recorded = step, time.perf_counter()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.now(self._part)
        self._write()
        self.event("end", reason="ended" if kind is None else f"{kind.__name__}: {error}"[:500])
        self._file.close()


@dataclass(frozen=True)
class Goodput:
    """The time of a run in process 0, over all attempts, by what it was spent on."""

    seconds: dict[str, float]
    """By PARTS; "lost work": repeated steps; "down": between attempts; and "other"."""
    attempts: int

    @property
    def total(self) -> float:
        """Seconds from the start of the first attempt to the end of the last."""
        return sum(self.seconds.values())

    @property
    def fraction(self) -> float:
        """The share of the total that went into steps that count."""
        return self.seconds.get("step", 0.0) / self.total if self.total else 0.0

    @property
    def tries(self) -> str:
        """The number of attempts, in words."""
        return "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"

    def __str__(self) -> str:
        shares = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in shares if seconds >= 0.05)
        return f"goodput {self.fraction:.1%} of {self.total:.1f} s in {self.tries}: {parts}"


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Read the events of a run, in order.

    Skips lines that are damaged or were cut off by a crash: nothing else depends on them.
    """
    return [record for record in json_lines.read(run_dir / EVENTS_FILE) if _is_whole(record)]


type _Number = Annotated[float, Meta(gt=-MAX_SECONDS, lt=MAX_SECONDS)]
type _Step = Annotated[int, Meta(ge=0, lt=1 << 31)]

#: The fields that are read of every event, and of those of some names.
OF_ALL = {"event": str, "attempt": int, "age": _Number, "time": _Number}
OF_SOME: dict[str, dict[str, Any]] = {
    "time": {"seconds": dict[str, _Number], "steps": tuple[_Step, _Step]},
    "from": {"step": _Step},
    "saved": {"step": _Step, "seconds": _Number},
    "save failed": {"step": _Step, "error": Any},
    "restored": {"source": str, "repeated": _Step},
}


@functools.cache
def _shape(name: str) -> type:
    """Return the type of an event, by its name."""
    return msgspec.defstruct("Event", [*(OF_ALL | OF_SOME.get(name, {})).items()])


def _is_whole(event: dict[str, Any]) -> bool:
    """Whether an event has all fields that are read of events of its name."""
    name = str(event.get("event"))
    try:
        return bool(msgspec.convert(event, _shape(name if name in OF_SOME else "")))
    except msgspec.ValidationError:
        return False


def goodput(events: Iterable[dict[str, Any]]) -> Goodput:
    """Compute where the time of a run went.

    Args:     events: from `read_events`.
    """
    seconds: dict[str, float] = defaultdict(float)
    taken: list[tuple[int, int, float]] = []  # steps that count so far: first, last, seconds
    ages: dict[int, float] = {}
    waited = waits = 0.0  # overlap of this attempt's start with the previous attempt; the total
    last: dict[str, Any] | None = None
    for event in events:
        if event["event"] == GENERATION:  # from a launcher, and of no attempt
            continue
        attempt, age = int(event["attempt"]), float(event["age"])
        if event["event"] == "start" and last is not None:
            gap = gap_before(event, last)
            seconds["down"] += max(gap, 0.0)
            waited = max(-gap, 0.0)
            waits += waited
        ages[attempt] = max(ages.get(attempt, 0.0), age)
        if event["event"] == "from":
            taken, lost = _split(taken, int(event["step"]))
            seconds["lost work"] += lost
        if event["event"] == "time":
            for part, spent in event["seconds"].items():
                seconds[part] += spent if part != "step" else 0.0
            if twice := min(waited, event["seconds"].get("init", 0.0)):
                seconds["init"] -= twice
                waited -= twice
            taken.append((*event["steps"], event["seconds"].get("step", 0.0)))
        last = event
    seconds["step"] = sum(spent for _, _, spent in taken)
    measured = sum(spent for part, spent in seconds.items() if part != "down")
    seconds["other"] = max(sum(ages.values()) - waits - measured, 0.0)
    return Goodput(dict(seconds), len(ages))


def gap_before(start: dict[str, Any], last: dict[str, Any]) -> float:
    """Return the seconds from the last event before an attempt to the start of its process.

    Negative if the process waited for the previous attempt to end. 0 if the event comes later by
    the wall clock, which was then set back.
    """
    if start["time"] < last["time"]:
        return 0.0
    return float(start["time"] - start["age"] - last["time"])


def _split(taken: list[tuple[int, int, float]], step: int):
    """Split at a step: return the records up to it, and the seconds spent beyond it."""
    kept, lost = [], 0.0
    for first, last, spent in taken:
        share = 1.0 if last <= step else max(step - first, 0) / max(last - first, 1)
        kept.append((first, min(last, step), spent * share))
        lost += spent * (1 - share)
    return kept, lost


#: The event of a start that has restored a state, and the parts of a start that only it needs.
RESTORED, OF_A_START = "restored", ("init", "compile", "restore")


@dataclass(frozen=True)
class RestartCosts:
    """The restarts of a run so far."""

    count: int
    down: float
    """Seconds between attempts."""
    starting: float
    """Seconds of all starts but the first."""
    repeated: float
    """Seconds of steps that were repeated, as far as they were recorded."""
    repeated_steps: int
    """Steps that were repeated."""
    sources: dict[str, int]
    """RestartCosts by where the state was: "memory" or "checkpoint"."""

    @property
    def seconds(self) -> float:
        """The time lost."""
        return self.down + self.starting + self.repeated

    def __str__(self) -> str:
        counted = "1 restart" if self.count == 1 else f"{self.count} restarts"
        text = f"{counted} cost {self.seconds:.1f} s: starting {self.starting:.1f}, down "
        text += f"{self.down:.1f}, repeated steps {self.repeated:.1f} ({self.repeated_steps} steps)"
        sources = ", ".join(f"{n} from {where}" for where, n in sorted(self.sources.items()))
        return f"{text}; {sources}" if sources else text


def restarts(events: Iterable[dict[str, Any]]) -> RestartCosts | None:
    """Compute what restarts cost; None for a run without any.

    Args:     events: from `read_events`.
    """
    events = list(events)
    found = goodput(events)
    if found.attempts < 2:
        return None
    first = min(event["attempt"] for event in events)
    again = [event for event in events if event["attempt"] != first]
    parts = [event["seconds"] for event in again if event["event"] == "time"]
    starting = sum(spent.get(name, 0.0) for spent in parts for name in OF_A_START)
    restored = [event for event in again if event["event"] == RESTORED]
    return RestartCosts(
        found.attempts - 1,
        found.seconds.get("down", 0.0),
        starting,
        found.seconds.get("lost work", 0.0),
        sum(event["repeated"] for event in restored),
        dict(Counter(event["source"] for event in restored)),
    )


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
