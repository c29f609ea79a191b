"""Builds the charts over steps: empty ones with tables, and the data with which the script draws
them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from jaxpar.config.schema.optimizer import AVERAGED
from jaxpar.tools.report import drawing, layers
from jaxpar.tools.report.drawing import short
from jaxpar.tools.report.elements import e, table
from jaxpar.tools.report.runs import OF_FOLLOWERS, OF_SETS, Mark, RunRead
from jaxpar.tools.report.series import Point

#: Rows per run in the table under a chart.
MAX_ROWS = 12

#: Most points of the table of a run's hours by step, of a line over time, and most marks of a kind.
MAX_HOURS, MAX_POINTS, MAX_MARKS = 200, 400, 100


@dataclass(frozen=True)
class Shown:
    """A chart of the report."""

    name: str
    """The metric, or "last half" for the second half of the loss."""
    title: str
    smooth: bool = False
    beside: str = ""
    """Another metric, drawn as points."""
    least: float = 0.2
    log: bool = False
    """`least`: smallest span of the axis relative to the largest value, so that noise is not
    magnified. `log`: whether the axis may be logarithmic."""


SHOWN = (
    Shown("loss", "Loss", smooth=True, beside="held_out_loss", least=0.0),
    Shown("last half", "Loss, second half", smooth=True, beside="held_out_loss", least=0.0),
    Shown("bits_per_byte", "Held-out text", least=0.0),
    Shown(f"{AVERAGED}_loss", "Held-out loss of the moving average"),
    Shown("grad_norm", "Gradient norm", smooth=True, log=True),
    Shown("learning_rate", "Learning rate"),
    Shown("global_batch_size", "Sequences of a step"),
    Shown("seq_len", "Tokens of a sequence"),
    Shown("tokens_per_second_per_device", "Throughput per device"),
    Shown("mfu", "Model FLOP utilization (MFU)"),
    Shown("memory_gib", "Peak memory"),
    Shown("data_wait_seconds", "Wait for data"),
    Shown("store_waiting_gb", "GB waiting for the store"),
    Shown("gpu_watts", "Power of a GPU"),
    Shown("gpu_clock_mhz", "Clock of the slowest GPU"),
    Shown("joules_per_token", "Energy per token"),
    Shown("loss_scale", "Loss scale", log=True),
    Shown("fullest_expert", "Fullest expert"),
    Shown("fullest_rank", "Fullest rank of the expert axis"),
    Shown("fullest_rank_mean", "Fullest rank in the mean layer"),
    Shown("expert_entropy", "Entropy of the experts' loads"),
    Shown("further_rounds", "Further rounds of the expert axis"),
)


def shown_of(runs: Sequence[RunRead]) -> list[Shown]:
    """Return the charts of some runs: SHOWN, one for each set of `evaluation.sets`, and one for
    each result of followers."""
    names = sorted({name for run in runs for name in run.series})
    found = [
        (n, f"Held-out loss of {n.removeprefix(OF_SETS)}") for n in names if n.startswith(OF_SETS)
    ]
    followed = {
        "followed_loss": "Loss, from a follower",
        "followed_bits_per_byte": "Bits per byte, from a follower",
    }
    for name in (name for name in names if name.startswith(OF_FOLLOWERS)):
        found.append((name, followed.get(name, name.partition("/")[2].replace("/", ", "))))
    return [*SHOWN, *(Shown(name, title) for name, title in found)]


def points_of(run: RunRead, name: str) -> list[Point]:
    """Return a run's values of a metric, with shares in percent."""
    if name == "last half":
        return run.last_half.points() if run.last_half is not None and run.last_step >= 40 else []
    if name not in run.series:
        return []
    factor = 100.0 if run.metric(name).unit == "share" else 1.0
    return [Point(p.step, *(factor * value for value in p[1:])) for p in run.series[name].points()]


def line_charts(runs: Sequence[RunRead]) -> list[Element]:
    """Return every chart for which a run has values."""
    found = [shown for shown in shown_of(runs) if any(points_of(r, shown.name) for r in runs)]
    return [_figure(runs, shown) for shown in found]


def _figure(runs: Sequence[RunRead], shown: Shown) -> Element:
    metric = "loss" if shown.name == "last half" else shown.name
    units = (run.metric(metric).unit for run in runs)
    unit = next(filter(None, units), "").replace("share", "%")
    nats = {"data-nats": f" {unit}"} if shown.beside == "held_out_loss" else {}
    head = e("h3", shown.title, e("span", f" {unit}", **nats) if unit else None)
    figure = e("figure", head, id=shown.name.replace(" ", "-").replace("_", "-"))
    about = "; ".join(_sentence(run, shown) for run in runs)
    script = {"data-metric": shown.name, "data-least": shown.least, "data-log": shown.log}
    figure.append(e("div", drawing.drawing(shown.title, about, script), class_="view"))
    figure.append(_table(runs, shown))
    return figure


def _sentence(run: RunRead, shown: Shown) -> str:
    points = points_of(run, shown.name)
    if not points:
        return f"{run.name}: no values"
    first, last = points[0], points[-1]
    span = f"{short(first.mean)} at step {first.step} to {short(last.mean)} at step {last.step}"
    return f"{run.name}: from {span}"


def _table(runs: Sequence[RunRead], shown: Shown) -> Element:
    """Return a table of some evenly spaced values, as a text alternative to the chart."""
    names = ["run", "step", "mean", "min", "max", *(["smoothed"] if shown.smooth else [])]
    rows = []
    for run in runs:
        points = points_of(run, shown.name)
        every = -(-len(points) // MAX_ROWS) or 1
        for p in points[::-1][::every][::-1]:
            numbers = [p.mean, p.low, p.high, *([p.smooth] if shown.smooth else [])]
            rows.append([run.name, f"{p.step:,}", *map(short, numbers)])
        for p in points_of(run, shown.beside)[-MAX_ROWS:] if shown.beside else ():
            cells = [short(p.mean), short(p.low), short(p.high), "held-out"]
            rows.append([run.name, f"{p.step:,}", *cells])
    return e("details", e("summary", "Values"), table(names, rows))


def page_data(runs: Sequence[RunRead]) -> dict[str, Any]:
    """Return the data with which the script draws the charts, and shows values.

    Returns:  for each run: its name, tokens per step, steps and tokens if steps differ in size,
              steps and hours since it began, and the same of each attempt, its marks, bits per byte
              of a nat per token; and by metric the steps `x` and values `y`. `m` has the means that
              are smoothed in `y`; `lo` and `hi` the range of values, where it is more than one.
    """
    beside = {shown.name: shown.beside for shown in SHOWN if shown.beside}
    return {"runs": [_run_data(run, shown_of(runs)) for run in runs], "beside": beside}


def _run_data(run: RunRead, charts: Sequence[Shown]) -> dict[str, Any]:
    metrics = {}
    names = [(shown.name, shown.smooth) for shown in charts]
    for name, smooth in (*names, ("held_out_loss", False)):
        points = points_of(run, name)
        if not points:
            continue
        found: dict[str, list[Any]] = {"x": [p.step for p in points]}
        found["y"] = _rounded(p.smooth if smooth else p.mean for p in points)
        if smooth:
            found["m"] = _rounded(p.mean for p in points)
        if any(p.low != p.high for p in points):
            found |= {"lo": _rounded(p.low for p in points), "hi": _rounded(p.high for p in points)}
        metrics[name] = found
    tokens, bits = run.tokens_per_step, bits_per_nat(run)
    about = {"name": run.name, "tokens_per_step": tokens, "bits": bits, "hours": hours_of(run)}
    about["progress"] = [list(zip(*_thinned(part), strict=True)) for part in run.progress if part]
    about["marks"] = marks_of(run)
    if run.sizes_change and "loss" in metrics:
        steps = metrics["loss"]["x"]
        about["tokens"] = steps, [run.tokens_at(step) for step in steps]
    return about | {"metrics": metrics, "layers": layers.data(run)}


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def bits_per_nat(run: RunRead) -> float:
    """Return the bits per byte of text of a loss of one nat per token; 0 if unknown."""
    bits, nats = run.last.get("bits_per_byte", 0.0), run.last.get("held_out_loss", 0.0)
    return bits / nats if bits > 0 and nats > 0 else 0.0


def hours_of(run: RunRead) -> tuple[list[int], list[float]]:
    """Return steps, ascending, and the hours since the run began at which they were done.

    A step that a later attempt repeated counts when it was done last. Empty without events.
    """
    by_step: dict[int, float] = {}
    for attempt in run.progress:
        if attempt:
            first = attempt[0][1]
            by_step = {step: at for step, at in by_step.items() if step < first}
            by_step |= {step: at for at, step in attempt}
    kept = sorted(by_step.items())
    every = -(-len(kept) // MAX_HOURS) or 1
    kept = [*kept[:-1:every], *kept[-1:]]
    return [step for step, _ in kept], [float(f"{at:.6g}") for _, at in kept]


def _thinned(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    every = -(-len(points) // MAX_POINTS) or 1
    return [*points[:-1:every], points[-1]]


def marks_of(run: RunRead) -> list[Mark]:
    """Return a run's marks; those of one kind that would overlap are merged."""
    width = max(run.last_step, 1) / MAX_MARKS
    kept: dict[tuple[str, int], list[Mark]] = {}
    for mark in run.marks:
        kept.setdefault((mark.kind, int(mark.step / width)), []).append(mark)
    more = lambda marks: f" (and {len(marks) - 1} more here)" if len(marks) > 1 else ""  # noqa: E731
    return [marks[0]._replace(text=marks[0].text + more(marks)) for marks in kept.values()]
