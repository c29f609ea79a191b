"""Draws the kernels of a profile below the roofline of their GPU.

A kernel's place is its FLOPs per byte and its FLOP/s, and its area its time in a step. The roof is
the least of the GPU's peak and its bandwidth times FLOPs per byte. A kernel's height below the roof
is its roofline share. Kernels without matrix products have no FLOPs here (`hlo/costs.py`): they are
at the left end, where their height below the roof is their share of the bandwidth.

Source:   Williams et al. 2009, "Roofline".
"""

from collections.abc import Sequence
from typing import Any

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


def roofline_svg(rows: Sequence[dict[str, Any]], gpu: Gpu, title: str, under: str) -> bytes:
    """Return the chart of kernels (`limits.with_bounds`) as an SVG file.

    Raises:   ValueError if no kernel has known costs.
    """
    known = [row for row in rows if row["flops"] is not None and row["bytes"]]
    if not known:
        raise ValueError("no kernel has known FLOPs and bytes")
    classes = [name for name in CLASSES if any(row["class"] == name for row in known)]
    chart = Scatter(
        title=title,
        about=f"FLOP/s over FLOPs per byte of {len(known)} kernels, and the roof of the {gpu.name}",
        x=Scale(*INTENSITY, log=True),
        y=Scale(LOWEST_SHARE * gpu.peak.value / 1e12, 1.6 * gpu.peak.value / 1e12, log=True),
        x_label="FLOPs per byte",
        points=[_point(row, classes.index(row["class"])) for row in known],
        lines=[Line(len(classes), _roof(gpu))],
    )
    return svg_file(scatter_chart(chart), title, under, [*classes, f"roof of the {gpu.name}"])


def _roof(gpu: Gpu) -> list[tuple[float, float]]:
    low, high = INTENSITY
    peak, bandwidth = gpu.peak.value, gpu.bandwidth.value
    return [(low, bandwidth * low / 1e12), (peak / bandwidth, peak / 1e12), (high, peak / 1e12)]


def _point(row: dict[str, Any], run: int) -> ScatterPoint:
    seconds = row["mean_us"] / 1e6
    x = max(row["flops"] / row["bytes"], INTENSITY[0])
    rate = row["flops"] / seconds if row["flops"] else row["bytes"] / seconds * INTENSITY[0]
    place = " ".join(filter(None, place_of(row["scope"]))) if row["scope"] else ""
    share = f", {row['roofline']:.0%} of the roof" if row["roofline"] else ""
    text = f"{row['name']} {place}: {row['ms']:.2f} ms per step{share}, limit {row['bound'] or '-'}"
    return ScatterPoint(run, x, rate / 1e12, row["ms"], text)
