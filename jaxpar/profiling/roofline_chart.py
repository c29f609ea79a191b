"""Draws the kernels of a profile below the roofline of their GPU.

A kernel's place is its FLOPs per byte and its FLOP/s, and its area its time in a step. The roof is
the least of the GPU's peak and its memory's peak times FLOPs per byte. A kernel's height below the
roof is its roofline share. Kernels without matrix products have no FLOPs here (`hlo/costs.py`):
they are at the left end, where their height below the roof is their share of the memory's peak.

Source:   Williams et al. 2009, "Roofline".
"""

from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

from jaxpar.charts.chart import Line
from jaxpar.charts.scale import Scale
from jaxpar.charts.scatter import Scatter, ScatterPoint, scatter_chart
from jaxpar.charts.standalone import svg_file
from jaxpar.planning.predict.hardware import Gpu
from jaxpar.profiling.trace.kernels import CLASSES
from jaxpar.profiling.trace.scopes import place_of

#: Ends of the axes: FLOPs per byte, and FLOP/s as a share of the peak.
INTENSITY = 1.0, 30_000.0
LOWEST_SHARE = 1e-4


def drawable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the kernels whose costs are known, of `breakdown.profile` on a GPU."""
    return [row for row in rows if row.get("bound") and row["flops"] is not None and row["bytes"]]


def roofline_chart(rows: Sequence[dict[str, Any]], gpu: Gpu) -> tuple[Element, list[str]]:
    """Return the chart of `drawable` kernels, and the names of its colors in order."""
    classes = [name for name in CLASSES if any(row["class"] == name for row in rows)]
    chart = Scatter(
        title="TFLOP/s of kernels, over FLOPs per byte",
        about=f"{len(rows)} kernels below the roof of the {gpu.name}",
        x=Scale(*INTENSITY, log=True),
        y=Scale(LOWEST_SHARE * gpu.peak.value / 1e12, 1.6 * gpu.peak.value / 1e12, log=True),
        x_label="FLOPs per byte",
        points=[_point(row, classes.index(row["class"])) for row in rows],
        lines=[Line(len(classes), _roof(gpu))],
    )
    return scatter_chart(chart), [*classes, f"roof of the {gpu.name}"]


def roofline_svg(rows: Sequence[dict[str, Any]], gpu: Gpu, title: str, under: str) -> bytes:
    """Return the chart of `drawable` kernels as an SVG file."""
    drawn, names = roofline_chart(rows, gpu)
    return svg_file(drawn, title, under, names)


def _roof(gpu: Gpu) -> list[tuple[float, float]]:
    low, high = INTENSITY
    peak, bandwidth = gpu.peak.value, gpu.memory_peak.value
    return [(low, bandwidth * low / 1e12), (peak / bandwidth, peak / 1e12), (high, peak / 1e12)]


def _point(row: dict[str, Any], run: int) -> ScatterPoint:
    seconds = row["mean_us"] / 1e6
    x = max(row["flops"] / row["bytes"], INTENSITY[0])
    rate = row["flops"] / seconds if row["flops"] else row["bytes"] / seconds * INTENSITY[0]
    place = " ".join(filter(None, place_of(row["scope"]))) if row["scope"] else ""
    share = f", {row['roofline']:.0%} of the roof" if row["roofline"] else ""
    text = f"{row['name']} {place}: {row['ms']:.2f} ms per step{share}, limit {row['bound'] or '-'}"
    return ScatterPoint(run, x, rate / 1e12, row["ms"], text)
