"""Draws a scatter plot: points whose area is a weight, above lines such as roofs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from jaxpar.charts.chart import Line, across, axes, color_of, drawing, path_of, up
from jaxpar.charts.elements import e
from jaxpar.charts.scale import Scale

#: Radius of the point with the largest weight, and of the smallest points.
MAX_RADIUS, MIN_RADIUS = 14.0, 2.5


@dataclass(frozen=True)
class ScatterPoint:
    """A point. `run` gives its color (`chart.color_of`), `weight` its area, `text` its tooltip."""

    run: int
    x: float
    y: float
    weight: float
    text: str


@dataclass(frozen=True)
class Scatter:
    """A scatter plot; points outside of the axes are moved to their ends."""

    title: str
    about: str
    """A description for screen readers."""
    x: Scale
    y: Scale
    x_label: str
    points: Sequence[ScatterPoint]
    lines: Sequence[Line] = ()


def scatter_chart(chart: Scatter) -> Element:
    """Draw a scatter plot. Larger points are behind smaller ones."""
    made = drawing(chart.title, chart.about, {})
    made.extend(axes(chart.x, chart.y, chart.x_label))
    for line in chart.lines:
        path = path_of(chart.x, chart.y, line.points)
        made.append(e("path", class_=f"line {color_of(line.run)}", d=path))
    heaviest = max((point.weight for point in chart.points), default=0.0) or 1.0
    for point in sorted(chart.points, key=lambda point: -point.weight):
        radius = max(MAX_RADIUS * math.sqrt(point.weight / heaviest), MIN_RADIUS)
        place = {
            "cx": f"{across(chart.x, _within(chart.x, point.x)):.1f}",
            "cy": f"{up(chart.y, _within(chart.y, point.y)):.1f}",
        }
        circle = e("circle", e("title", point.text), r=f"{radius:.1f}", **place)
        made.append(e("g", circle, class_=f"dots {color_of(point.run)}"))
    return made


def _within(scale: Scale, value: float) -> float:
    return min(max(value, scale.low), scale.high)
