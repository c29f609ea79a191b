"""Charts of a run's time: step times, progress over time, and time by activity."""

from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

from jaxpar.runtime.units import duration
from jaxpar.tools.report import drawing
from jaxpar.tools.report.elements import e, table
from jaxpar.tools.report.runs import KINDS, RunRead

#: Bars of a histogram.
BARS = 40

#: Most checkpoints in the table of progress.
MAX_SAVES = 12


def histogram(runs: Sequence[RunRead]) -> Element | None:
    """Return the histogram of step times."""
    found = [(i, run.speed.step_seconds) for i, run in enumerate(runs)]
    shown = [(i, sizes) for i, sizes in found if sizes]
    if not shown:
        return None
    bars = [(i, *sizes.bars(BARS)) for i, sizes in shown]
    rows = []
    for i, sizes in shown:
        quantiles = [f"{sizes.quantile(share):.4g}" for share in (0.0, 0.5, 0.9, 0.99, 1.0)]
        rows.append([runs[i].name, f"{len(sizes):,}", *quantiles])
    about = "; ".join(f"{row[0]}: median {row[3]} s, 99% at most {row[5]} s" for row in rows)
    drawn = drawing.histogram("Step time", about, "seconds", bars)
    names = ["run", "records", "min", "median", "90%", "99%", "max"]
    return e(
        "figure",
        e("h3", "Step time", e("span", " % of the records since devices and sizes last changed")),
        drawn,
        e("details", e("summary", "Values"), table(names, rows)),
        id="step-time",
    )


def progress(runs: Sequence[RunRead]) -> Element | None:
    """Return the chart of steps over time, with events."""
    hours = max((x for run in runs for part in run.progress for x, _ in part), default=0.0)
    if hours <= 0:
        return None
    unit, factor = ("hours", 1.0) if hours >= 2 else ("minutes", 60.0)
    counts = [f"{run.name}: {_counted(run)}" for run in runs]
    rows = [
        [run.name, m.kind, m.step, f"{m.hours * factor:.2f}" if m.hours is not None else "", m.text]
        for run in runs
        for m in _important(run)
    ]
    names = ["run", "event", "step", unit, ""]
    about = {"data-metric": "progress", "data-unit": unit, "data-factor": factor}
    drawn = drawing.drawing("Progress over time", "; ".join(counts), about)
    return e(
        "figure",
        e("h3", "Progress over time", e("span", " completed steps")),
        e("div", drawn, class_="view"),
        e("details", e("summary", "Values"), table(names, rows, texts=2)),
        id="progress",
    )


def _counted(run: RunRead) -> str:
    kinds = [mark.kind for mark in run.marks]
    return (
        ", ".join(f"{kind} {kinds.count(kind)}" for kind in KINDS if kind in kinds) or "no events"
    )


def _important(run: RunRead) -> list[Any]:
    """Return the marks for the table: recent events, and the latest checkpoints."""
    rest = [mark for mark in run.marks if mark.kind != "saved"]
    return rest[-50:] + [mark for mark in run.marks if mark.kind == "saved"][-MAX_SAVES:]


def goodput(runs: Sequence[RunRead]) -> Element | None:
    """Return a bar of each run's time by activity."""
    section = e("figure", e("h3", "Where the time went"), id="goodput", class_="wide")
    for run in runs:
        if run.goodput is not None and run.goodput.total:
            section.append(_goodput(run, several=len(runs) > 1))
    return section if len(section) > 1 else None


def _goodput(run: RunRead, *, several: bool) -> Element:
    found = run.goodput
    assert found is not None
    rest = sorted(found.seconds.items(), key=lambda item: (item[0] != "step", -item[1]))
    parts = [(name, spent) for name, spent in rest if spent > 5e-4 * found.total]
    text = f"{run.name}: " if several else ""
    text += f"goodput {found.fraction:.1%} of {duration(found.total)}, {found.tries}"
    items = [
        e(
            "li",
            e("i", class_=drawing.part_class(name)),
            f"{name} {duration(spent)}, {spent / found.total:.1%}",
        )
        for name, spent in parts
    ]
    bar = drawing.share_bar(f"{run.name}: where the time went", parts)
    lost = [e("p", str(run.restarts))] if run.restarts is not None else []
    return e("div", e("p", text), bar, e("ul", *items, class_="parts"), *lost)
