"""Prints and draws what was simulated."""

from collections.abc import Mapping
from typing import Any

from jaxpar.charts.chart import Chart, Line, line_chart
from jaxpar.charts.scale import Scale, scale_of
from jaxpar.charts.standalone import svg_file
from jaxpar.goodput import study, theory
from jaxpar.goodput.failures import DAY, HOUR, per_second
from jaxpar.goodput.recovery import Policy
from jaxpar.goodput.run import PARTS


def hours_between(scene: study.Scene) -> float:
    """Return the mean hours between failures of the run, without planned stops."""
    each = per_second(scene.rates, scene.hosts, scene.gpus_per_host)
    total = sum(rate for kind, rate in each.items() if kind != "planned")
    return 1 / (total * HOUR) if total else float("inf")


def in_words(scene: study.Scene) -> str:
    """Describe what is simulated in one line."""
    gpus = scene.hosts * scene.gpus_per_host
    between = hours_between(scene)
    text = f"{gpus:,} GPUs in {scene.hosts:,} hosts, {scene.seconds / DAY:g} days"
    text += f", {len(scene.seeds)} seeds; "
    return text + (f"a failure every {between:.1f} h" if between < 1e6 else "no failures")


def table(results: Mapping[str, study.Result]) -> str:
    """Return the shares of the time by part: a column for each result."""
    rows: list[list[str]] = [["", *results]]
    each = list(results.values())
    rows.append(["steps between saves to disk", *(_every(r.policy.disk.every) for r in each)])
    rows.append(["steps between mirrors", *(_every(r.policy.memory.every) for r in each)])
    rows.append(["goodput", *(f"{r.goodput.value:.2%}" for r in each)])
    rows.append(["  ± (95%)", *(f"{r.goodput.error:.2%}" for r in each)])
    for part in PARTS[1:]:
        shares = [r.share(part) for r in each]
        if any(shares):
            rows.append([part, *(f"{share:.2%}" for share in shares)])
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = (cell.rjust(w) for cell, w in zip(cells, wide[1:], strict=True))
        lines.append("  ".join([name.ljust(wide[0]), *padded]).rstrip())
    return "\n".join(lines)


def _every(steps: int) -> str:
    return f"{steps:,}" if steps else "-"


def remarks(results: Mapping[str, study.Result]) -> list[str]:
    """Return what the table does not say: recoveries, lost steps, Daly's interval."""
    found = []
    for name, result in results.items():
        runs = result.outcomes
        loaded = {
            place: sum(one.loaded[place] for one in runs) / len(runs)
            for place in ("memory", "disk", "start")
        }
        counts = ", ".join(f"{count:.1f} from {place}" for place, count in loaded.items() if count)
        most = max(one.most_lost for one in runs)
        found.append(f"{name}: starts of a run {counts or 'none'}; at most {most:,} steps lost")
    return found


def record(result: study.Result) -> dict[str, Any]:
    """Return a result for --json."""
    runs = result.outcomes
    return {
        "disk_every": result.policy.disk.every,
        "memory_every": result.policy.memory.every,
        "goodput": result.goodput.value,
        "goodput_error_95": result.goodput.error,
        "shares": {part: result.share(part) for part in PARTS},
        "steps": [one.steps for one in runs],
        "failures": [dict(one.failures) for one in runs],
        "starts_from": [dict(one.loaded) for one in runs],
        "most_steps_lost": max(one.most_lost for one in runs),
    }


def chart(policy: Policy, scene: study.Scene, watch: study.Watch) -> bytes:
    """Draw the goodput by steps between saves, with and without mirrors, as an SVG file."""
    tried = [n for n in study.TRIED if 10 <= n <= 3200][::2]
    mirrors = {"disk alone": 0}
    if policy.memory.every:
        mirrors[f"mirrors every {policy.memory.every} steps"] = policy.memory.every
    lines = []
    for i, every in enumerate(mirrors.values()):
        here = study.with_intervals(policy, policy.disk.every, every)
        results = study.over_intervals(here, scene, tried, "disk", watch)
        middle = [(n, r.goodput.value) for n, r in zip(tried, results, strict=True)]
        band = [
            (n, r.goodput.value - r.goodput.error, r.goodput.value + r.goodput.error)
            for n, r in zip(tried, results, strict=True)
        ]
        lines.append(Line(i, middle, "dots", band))
    values = [value for line in lines for _, low, high in line.band for value in (low, high)]
    y = scale_of(values)
    x = Scale(tried[0] / 1.2, tried[-1] * 1.2, log=True, marks=(10.0, 32.0, 100.0, 316.0, 1000.0))
    daly = theory.daly(policy.disk.blocking, hours_between(scene) * HOUR) / policy.step
    under = f"{in_words(scene)}; Daly's interval {daly:,.0f} steps"
    about = "goodput with its 95% confidence interval by steps between saves to disk"
    made = line_chart(Chart("Goodput", about, x, y, "steps between saves to disk", lines))
    return svg_file(made, "Goodput by steps between saves", under, list(mirrors))
