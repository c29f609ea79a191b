"""Metrics of layers: read in bounded memory, and drawn by the script as heat maps over steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element

import numpy as np

from jaxpar.tools.report import drawing as chart
from jaxpar.tools.report.drawing import short
from jaxpar.tools.report.elements import e, table
from jaxpar.tools.report.series import can_be_shown

if TYPE_CHECKING:
    from jaxpar.tools.report.runs import RunRead

#: Most columns and cells of a map, and maps and layers of a run: a file may have any number.
MAX_COLUMNS, MAX_CELLS, MAX_MAPS, MAX_LAYERS = 120, 20_000, 32, 1000

#: Height of a layer's row, limits on that of a map, and the height of axis and legend below it.
_ROW, _MIN_HEIGHT, _MAX_HEIGHT, _BELOW = 16, 64, 320, 92

#: Drawn from the file of loads where a run has it.
FULLEST = "layer_fullest_expert"

TITLES = {
    "layer_rms": "Residual stream by layer",
    "layer_grad_norm": "Gradient norm by layer",
    "layer_update": "Update by layer",
    "layer_max_score": "Attention score by layer",
    FULLEST: "Fullest expert by layer",
}


@dataclass
class LayerMap:
    """A metric of a run's layers: the largest value of each layer in each range of steps."""

    layers: int
    last_step: int
    """Of the run: the ranges divide the steps up to it."""
    found: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """By range that has a record, the last step with one, and float64 [layers]; NaN for none."""

    def add(self, step: int, values: Sequence[Any]) -> None:
        """Add the values of a step. What is no number that can be shown counts as none."""
        if len(values) != self.layers or not 0 < step <= self.last_step:
            return
        columns = max(min(MAX_COLUMNS, MAX_CELLS // self.layers), 1)
        at = (step - 1) * min(columns, self.last_step) // self.last_step
        here = np.array([_number(value) for value in values])
        _, before = self.found.get(at, (0, here))
        self.found[at] = step, np.fmax(before, here)

    def table(self) -> tuple[list[int], np.ndarray]:
        """Return the last step of each range, and the values, float64 [layers, ranges]."""
        steps, columns = zip(*(self.found[at] for at in sorted(self.found)), strict=True)
        return list(steps), np.stack(columns, axis=1)


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and can_be_shown(value) else math.nan


def read(maps: dict[str, LayerMap], record: dict[str, Any], last_step: int) -> None:
    """Add the lists of layers in a record of metrics.jsonl to the maps of a run, by name."""
    for name, values in record.items():
        if name == "epochs" or not isinstance(values, list) or not 0 < len(values) <= MAX_LAYERS:
            continue
        if name not in maps and len(maps) < MAX_MAPS:
            maps[name] = LayerMap(len(values), last_step)
        if name in maps:
            maps[name].add(record["step"], values)


def data(run: "RunRead") -> dict[str, Any]:
    """Return what the script draws: by metric, steps `x`, and for each layer its values `rows`."""
    found = {}
    for name, one in maps_of(run).items():
        steps, values = one.table()
        found[name] = {"x": steps, "rows": [[_rounded(v) for v in row] for row in values]}
    return found


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")


def maps_of(run: "RunRead") -> dict[str, LayerMap]:
    """Return the maps of a run that have values."""
    return {
        name: one
        for name, one in run.layers.items()
        if not (name == FULLEST and run.loads is not None)
        and any(np.isfinite(values).any() for _, values in one.found.values())
    }


def figures(runs: Sequence["RunRead"]) -> list[Element]:
    """Return a figure for each metric of layers, with a heat map of each run that has it."""
    shown = [maps_of(run) for run in runs]
    names = dict.fromkeys([*TITLES, *(name for maps in shown for name in maps)])
    return [_figure(runs, shown, name) for name in names if any(name in maps for maps in shown)]


def _figure(runs: Sequence["RunRead"], shown: list[dict[str, LayerMap]], name: str) -> Element:
    first = next(run for run, maps in zip(runs, shown, strict=True) if name in maps)
    metric, title = first.metric(name), TITLES.get(name, name)
    about = ", ".join(filter(None, (metric.meaning, metric.unit)))
    head = e("h3", title, e("span", f" {about}") if about else None)
    figure = e("figure", head, id=f"layers-{name}")
    rows = []
    for index, (run, maps) in enumerate(zip(runs, shown, strict=True)):
        if name not in maps:
            continue
        steps, values = maps[name].table()
        if len(runs) > 1:
            figure.append(e("p", run.name, class_="note"))
        low, high = np.nanmin(values), np.nanmax(values)
        text = f"{run.name}: {len(values)} layers, {short(low)} to {short(high)}"
        height = round(min(max(_ROW * len(values), _MIN_HEIGHT), _MAX_HEIGHT))
        script = {"data-map": name, "data-run": index, "data-bottom": chart.TOP + height}
        drawing = chart.drawing(title, text, script, chart.TOP + height + _BELOW)
        figure.append(e("div", drawing, class_="view"))
        for layer, row in enumerate(values):
            there = row[np.isfinite(row)] if np.isfinite(row).any() else row[:1]
            cells = [row[0], row[-1], there.min(), there.max()]
            rows.append([run.name, layer, *("–" if math.isnan(c) else short(c) for c in cells)])
    names = ["run", "layer", "first", "last", "min", "max"]
    figure.append(e("details", e("summary", "Values"), table(names, rows)))
    return figure
