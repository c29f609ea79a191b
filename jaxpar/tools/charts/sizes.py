"""The chart of sizes against the width of a model, as an SVG file."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxpar.tools.charts.chart import Chart, Line, line_chart
from jaxpar.tools.charts.scale import Scale
from jaxpar.tools.charts.standalone import svg_file


def size_chart(sizes: Mapping[int, Mapping[str, float]], title: str, under: str) -> bytes:
    """Draw sizes against the width, both on logarithmic axes.

    Args:     sizes: by width, then by kind. under: the line under the title.
    """
    kinds = tuple(next(iter(sizes.values())))
    values = [size for of_width in sizes.values() for size in of_width.values()]
    x = dataclasses.replace(_axis(list(sizes)), marks=tuple(map(float, sizes)))
    lines = [
        Line(i, [(width, of_width[kind]) for width, of_width in sizes.items()], "dots")
        for i, kind in enumerate(kinds)
    ]
    made = line_chart(Chart(title, under, x, _axis(values), "d_model", lines))
    return svg_file(made, title, under, kinds)


def _axis(values: Sequence[float]) -> Scale:
    low, high = max(min(values), 1e-12), max(values)
    margin = (high / low) ** 0.05 if high > low else 1.1
    return Scale(low / margin, high * margin, log=True)
