"""What runs with random losses of hosts have measured, beside what the simulator predicts."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxpar.goodput import study
from jaxpar.goodput.failures import Interruption, Rates
from jaxpar.goodput.recovery import Policy, Saves
from jaxpar.goodput.run import Outcome, Simulation
from jaxpar.monitoring.goodput import GENERATION
from jaxpar.monitoring.restarts import RESTORED

#: Runs that are simulated with losses at other times.
SEEDS = 400

#: Fewest steps of a known time on a number of hosts.
FEWEST_STEPS = 5

#: Where the time goes: as measured, and the parts of the simulator (`goodput.run.PARTS`).
PARTS = {
    "steps that count": ("step",),
    "repeated, or cut off": ("lost work",),
    "not training": ("save wait", "detect", "restart", "load", "no hosts"),
    "fewer hosts, copies, saves": ("fewer hosts", "mirror wait"),
}


class Seen(NamedTuple):
    """A record of a step, when it was there. It comes when the next step has been dispatched."""

    time: float
    step: int
    seconds: float | None
    """The step's time without pauses; None for the first one after a pause."""
    loss: float


@dataclass
class Attempt:
    """The steps of one generation that were seen."""

    hosts: int
    source: str = ""
    """Where its state came from: memory, checkpoint, or empty for a new run."""
    loaded: float = 0.0
    """Seconds to load it."""
    steps: list[Seen] = field(default_factory=list)

    def cut_off(self, lost: float) -> float:
        """Return the seconds of a step under way when a host was lost; 0 if none was."""
        known = [one.seconds for one in self.steps if one.seconds is not None]
        gap = lost - self.steps[-1].time
        return gap if known and 0 < gap < 2 * statistics.median(known) else 0.0


class Recovery(NamedTuple):
    """From the loss of a host to the next step, or between two steps to take a host in."""

    loss: bool
    seconds: float
    hosts: int
    """That train afterwards."""
    source: str
    repeated: int
    """Steps whose records were there, and that are done again."""
    between: float
    """Seconds between the records of the last step before and the first one after."""
    cut_off: float
    """Seconds of the step that the loss cut off; 0 if it came while nothing trained."""


@dataclass(frozen=True)
class Trial:
    """One run. All times are seconds since its first step."""

    name: str
    memory_every: int
    """Steps between copies in memory; 0: none."""
    seconds: float
    hosts: int
    steps: list[Seen]
    losses: list[tuple[float, int]]
    """Times and hosts."""
    back: list[tuple[float, int]]
    events: list[dict[str, Any]]

    def of_events(self, name: str) -> Iterator[dict[str, Any]]:
        """The events of a name, until the end."""
        return (e for e in self.events if e["event"] == name and e["time"] <= self.seconds)

    def attempts(self) -> list[Attempt]:
        """The attempts that took steps, in order."""
        starts = list(self.of_events("start"))
        per_host = starts[0]["devices"] // self.hosts
        ends = [start["time"] for start in starts[1:]] + [float("inf")]
        began, found = float("-inf"), []
        restored = {e["attempt"]: e for e in self.of_events(RESTORED)}
        for start, end in zip(starts, ends, strict=True):
            inside = [one for one in self.steps if began <= one.time < end]
            began = end
            state = restored.get(start["attempt"], {})
            source, loaded = state.get("source", ""), state.get("seconds", 0.0)
            if inside:
                found.append(Attempt(start["devices"] // per_host, source, loaded, inside))
        return found

    def recoveries(self) -> list[Recovery]:
        """Between each attempt and the next one that took steps."""
        found, attempts = [], self.attempts()
        for before, after in itertools.pairwise(attempts):
            last, first = before.steps[-1], after.steps[0]
            lost = [t for t, _ in self.losses if last.time - 1 < t < first.time]
            began = max(lost[0], last.time) if lost else last.time
            found.append(
                Recovery(
                    bool(lost),
                    first.time - began,
                    after.hosts,
                    after.source,
                    max(last.step - first.step + 1, 0),
                    first.time - last.time,
                    before.cut_off(began),
                )
            )
        return found


def step_times(trials: Sequence[Trial]) -> dict[int, float]:
    """Return the mean seconds of a step by the number of hosts, without copies if one run made
    none."""
    plain = [trial for trial in trials if not trial.memory_every] or trials
    times: dict[int, list[float]] = {}
    for attempt in (a for trial in plain for a in trial.attempts()):
        known = [one.seconds for one in attempt.steps if one.seconds is not None]
        times.setdefault(attempt.hosts, []).extend(known)
    return {n: statistics.mean(t) for n, t in sorted(times.items()) if len(t) >= FEWEST_STEPS}


def fixed_part(times: dict[int, float], hosts: int) -> float:
    """Return the part of a step that is not longer on fewer hosts, by least squares."""
    whole = times[hosts]
    longer = {n: hosts / n - 1 for n in times if n != hosts}
    if not longer:
        return 0.0
    slope = sum((times[n] - whole) * x for n, x in longer.items())
    slope /= sum(x * x for x in longer.values())
    return min(max(whole - slope, 0.0), whole)


def delays(trial: Trial, times: dict[int, float], every: int) -> tuple[float, float]:
    """Return the seconds by which a save to disk and a copy in memory delay training.

    Of a run with copies: the mean that the loop waited for saves, and what its steps took beyond
    that and their own time, divided by the copies. Of a run without: the same divided by the saves.
    """
    later, saves = 0.0, 0
    for attempt in trial.attempts():
        pairs = list(itertools.pairwise(attempt.steps))
        step = times.get(attempt.hosts, times[trial.hosts])
        later += sum(b.time - a.time - step for a, b in pairs)
        saves += sum(a.step % every == 0 for a, _ in pairs)
    waited = mean(e["loop_waited"] for e in trial.of_events("saved"))
    copies = len(list(trial.of_events("copied")))
    if trial.memory_every:
        return waited, max(later - saves * waited, 0.0) / copies if copies else 0.0
    return max(later, 0.0) / saves if saves else waited, 0.0


def mean(values: Iterable[float]) -> float:
    """Return the mean of values; 0 of none."""
    return statistics.mean(found) if (found := list(values)) else 0.0


def policy_of(trial: Trial, times: dict[int, float], every: int, back: float, least: int) -> Policy:
    """Return the policy of the simulator, with the means of a run's own times."""
    events = lambda name: list(trial.of_events(name))  # noqa: E731
    restored, of_disk, in_memory = events(RESTORED), *delays(trial, times, every)
    load = lambda name: mean(e["seconds"] for e in restored if e["source"] == name)  # noqa: E731
    complete = mean(max(e["seconds"] - e["loop_waited"], 0) for e in events("saved"))
    copied = mean(e["write_seconds"] + e["send_seconds"] for e in events("copied"))
    formed = [e for e in events(GENERATION) if e["step"] > 1]
    ended = [e["time"] - e["seconds"] for e in formed if e["lost"]]
    noticed = [(end, [t for t, _ in trial.losses if t < end]) for end in ended]
    step, loads = times[trial.hosts], mean(e["seconds"] for e in restored)
    return Policy(
        step,
        Saves(every, of_disk, complete, load("checkpoint")),
        Saves(trial.memory_every, in_memory, copied, load("memory")),
        detect=mean(end - losses[-1] for end, losses in noticed if losses),
        restart=max(mean(e["seconds"] for e in formed) - loads - step, 0.0),
        repair=back,
        fewest=least,
        fixed=fixed_part(times, trial.hosts),
    )


def measured_parts(trial: Trial, times: dict[int, float]) -> tuple[int, dict[str, float]]:
    """Return the steps that count, and where the time went."""
    attempts, recoveries = trial.attempts(), trial.recoveries()
    step = times[trial.hosts]
    on = lambda hosts: times.get(hosts, step)  # noqa: E731
    stopped = sum(r.between - r.cut_off - on(r.hosts) for r in recoveries)
    lost = sum(r.cut_off for r in recoveries)
    for before, r in zip(attempts, recoveries, strict=False):
        lost += r.repeated * on(before.hosts)
    last = attempts[-1].steps[-1].time
    if after := [t for t, _ in trial.losses if t > last]:  # it ended while the run recovered
        lost += (cut_off := attempts[-1].cut_off(after[0]))
        stopped += trial.seconds - last - cut_off
    # The time begins at the end of the first step.
    counted = attempts[-1].steps[-1].step - attempts[0].steps[0].step
    found = dict(zip(PARTS, (counted * step, lost, stopped), strict=False))
    return counted, found | {list(PARTS)[-1]: trial.seconds - sum(found.values())}


def predicted(trial: Trial, policy: Policy, rates: Rates) -> tuple[Outcome, study.Result]:
    """Simulate the run with the losses that it had, and with others of the same rate."""
    losses = iter([Interruption(t, "host", host) for t, host in trial.losses])
    same = Simulation(policy, trial.hosts, losses, trial.seconds).run()
    scene = study.Scene(trial.hosts, 1, rates, trial.seconds, range(SEEDS))
    return same, study.simulate(policy, scene)


def apart(trial: Trial) -> float:
    """Return the largest relative difference between losses of a step that was repeated."""
    by_step: dict[int, list[float]] = {}
    for one in trial.steps:
        by_step.setdefault(one.step, []).append(one.loss)
    return max((max(v) - min(v)) / abs(min(v)) for v in by_step.values())


def of_trials(
    trials: Sequence[Trial], every: int, back: float, least: int, rates: Rates
) -> dict[str, Any]:
    """Return the figures of the runs, for the card and the table."""
    times = step_times(trials)
    found = []
    for trial in trials:
        policy = policy_of(trial, times, every, back, least)
        counted, parts = measured_parts(trial, times)
        same, others = predicted(trial, policy, rates)
        spread = statistics.stdev(one.goodput for one in others.outcomes)
        recoveries = trial.recoveries()
        share = lambda names, o=same: sum(o.seconds[name] for name in names) / o.total  # noqa: E731
        found.append(
            {
                "name": trial.name,
                "steps": counted,
                "predicted_steps": same.steps,
                "goodput": parts["steps that count"] / trial.seconds,
                "predicted": same.goodput,
                "predicted_others": [others.goodput.value, spread],
                "parts": {name: seconds / trial.seconds for name, seconds in parts.items()},
                "predicted_parts": {name: share(names) for name, names in PARTS.items()},
                "recoveries": [r._asdict() for r in recoveries],
                "furthest_repeated_loss": apart(trial),
                "policy": dataclasses.asdict(policy),
                "trial": dataclasses.asdict(trial),
            }
        )
    return {"step_seconds_by_hosts": times, "runs": found}


def as_text(found: dict[str, Any]) -> str:
    """Return the figures as Markdown tables."""
    runs = found["runs"]
    rows = [["", *(r["name"] for r in runs)], ["---"] * (len(runs) + 1)]
    row = lambda name, told: rows.append([name, *(told(r) for r in runs)])  # noqa: E731
    row(
        "hosts lost, hosts back",
        lambda r: f"{len(r['trial']['losses'])}, {len(r['trial']['back'])}",
    )
    row("steps that count, predicted", lambda r: f"{r['steps']}, {r['predicted_steps']}")
    row("goodput", lambda r: f"{r['goodput']:.1%}")
    row("predicted, same losses", lambda r: f"{r['predicted']:.1%}")
    other = lambda r: "{:.1%} ± {:.1%}".format(*r["predicted_others"])  # noqa: E731
    row(f"predicted, {SEEDS} other runs, ± standard deviation", other)
    for name in PARTS:
        both = lambda r, n=name: f"{r['parts'][n]:.1%}, {r['predicted_parts'][n]:.1%}"  # noqa: E731
        row(f"{name}; predicted", both)
    row("from a loss to the next step, s", lambda r: _spread(r, loss=True))
    row("hosts taken in: between two steps, s", lambda r: _spread(r, loss=False))
    repeated = lambda r: [one["repeated"] for one in r["recoveries"]]  # noqa: E731
    row(
        "repeated steps, most at once",
        lambda r: f"{sum(repeated(r))}, {max(repeated(r), default=0)}",
    )
    row("restarts from memory, from disk", _sources)
    row("losses of repeated steps differ by", lambda r: f"{r['furthest_repeated_loss']:.1e}")
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    steps = ", ".join(f"{t:.3f} s on {n}" for n, t in found["step_seconds_by_hosts"].items())
    lines.append(f"\na step by hosts: {steps}")
    return "\n".join([*lines, *(_policy(r) for r in runs)])


def _spread(run: dict[str, Any], *, loss: bool) -> str:
    seconds = [one["seconds"] for one in run["recoveries"] if one["loss"] == loss]
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


def _sources(run: dict[str, Any]) -> str:
    sources = [one["source"] for one in run["recoveries"]]
    return f"{sources.count('memory')}, {sources.count('checkpoint')}"


def _policy(run: dict[str, Any]) -> str:
    p = run["policy"]
    text = f"{run['name']}: detect {p['detect']:.1f} s, restart {p['restart']:.1f}, fixed part of "
    text += f"a step {p['fixed']:.3f}; to disk {_saves(p['disk'])}"
    return text + (f"; to memory {_saves(p['memory'])}" if p["memory"]["every"] else "")


def _saves(saves: dict[str, float]) -> str:
    text = f"every {saves['every']} steps, which wait {saves['blocking']:.2f} s, complete after "
    return text + f"{saves['seconds']:.2f} s more, loaded in {saves['load']:.2f} s"
