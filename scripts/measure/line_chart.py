"""Draws line charts of measurements as SVG files, with their own style, title and legend."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

from jaxpar.tools.report.drawing import (
    COLOURS,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    across,
    axes,
    color_of,
    drawing,
    round_step,
    short,
    up,
)
from jaxpar.tools.report.elements import e

#: An axis of positive values is logarithmic if its ends differ by more than this factor.
LOGARITHMIC = 50.0


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False
    marks: tuple[float, ...] = ()
    """Values to label in place of round numbers."""

    def at(self, value: float) -> float:
        """Return the position of a value: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return `marks`, or at most about `most` round numbers on the axis, with their labels."""
        if self.marks:
            return [(value, short(value)) for value in self.marks]
        if self.log:
            return _decades(self.low, self.high, most)
        step = round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [(i * step, short(i * step, step)) for i in range(first, last + 1)]


def scale_of(values: Iterable[float], *, least: float = 0.0, log: bool = False) -> Scale:
    """Return an axis that covers the values, with a margin.

    Args:     least: smallest span relative to the largest value, so that noise is not magnified.
              log: whether the axis may be logarithmic.
    """
    held = list(values)
    low, high = min(held), max(held)
    if log and low > 0 and high / low > LOGARITHMIC:
        margin = (high / low) ** 0.04
        return Scale(low / margin, high * margin, True)
    spare = max(least * abs(high) - (high - low), 0.0)
    low, high = (max(low - spare, 0.0) if low >= 0 else low - spare), high
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(max(low - margin, 0.0) if low >= 0 else low - margin, high + margin)


def _decades(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Return powers of ten, with 2 and 5 times them if there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= most:
            break
    return [(value, short(value, value)) for value in found[:: -(-len(found) // most) or 1]]


#: Most dots on a line. The line passes through all points.
MAX_DOTS = 20


@dataclass(frozen=True)
class Line:
    """A run's line in a chart."""

    run: int
    points: Sequence[tuple[float, float]]
    kind: str = "line"
    """line, raw (faint) or dots (points connected by a line)."""
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): the range of the values that the line averages."""


@dataclass(frozen=True)
class Chart:
    """A line chart."""

    title: str
    about: str
    """A description for screen readers."""
    x: Scale
    y: Scale
    x_label: str
    lines: Sequence[Line]


def line_chart(chart: Chart) -> Element:
    """Draw a line chart."""
    made = drawing(chart.title, chart.about, {})
    made.extend(axes(chart.x, chart.y, chart.x_label))
    for line in chart.lines:
        color = color_of(line.run)
        if line.band:
            made.append(e("path", class_=f"band {color}", d=_band(chart, line.band)))
        if len(line.points) > 1:
            kind = "line thin" if line.kind == "dots" else line.kind
            made.append(
                e("path", class_=f"{kind} {color}", d=path_of(chart.x, chart.y, line.points))
            )
        if line.kind == "dots" or len(line.points) == 1:
            made.append(_dots(chart, line, color))
    return made


def path_of(x: Scale, y: Scale, points: Iterable[tuple[float, float]]) -> str:
    """Return the SVG path through points."""
    return "M" + "L".join(f"{across(x, at):.1f} {up(y, value):.1f}" for at, value in points)


def _band(chart: Chart, band: Sequence[tuple[float, float, float]]) -> str:
    over = [(x, high) for x, _, high in band]
    under = [(x, low) for x, low, _ in reversed(band)]
    return path_of(chart.x, chart.y, over + under) + "Z"


def _dots(chart: Chart, line: Line, color: str) -> Element:
    every = -(-len(line.points) // MAX_DOTS)
    dots = e("g", class_=f"dots {color}")
    for x, y in line.points[::-1][::every]:
        place = {"cx": f"{across(chart.x, x):.1f}", "cy": f"{up(chart.y, y):.1f}"}
        dots.append(e("circle", e("title", f"{short(y)} at {short(x)}"), r=3, **place))
    return dots


#: Okabe and Ito's colors, darkened where thin lines on white need it, as in the report. Explicit,
#: since few viewers besides browsers know CSS variables.
PALETTE = ("#0072b2", "#d55e00", "#007a5a", "#b0528f", "#a07400", "#2a9bd6", "#444b54")
assert len(PALETTE) == COLOURS

STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#5b6470}
.title{font-size:15px;font-weight:600;fill:#1b1f24} .under{fill:#5b6470} .key{fill:#1b1f24}
.ground{fill:#fff} .grid{stroke:#dde1e6} .axis{stroke:#5b6470} .cross{visibility:hidden}
.ylabel,.xname{text-anchor:end} .xlabel{text-anchor:middle}
.line{fill:none;stroke-width:2} .thin{stroke-width:1.25} .raw{fill:none;opacity:.45}
.band{stroke:none;opacity:.22} .dots circle{fill:#fff;stroke-width:2}
.dash1{stroke-dasharray:7 3} .dash2{stroke-dasharray:2 3}
""" + "\n".join(f".r{i}{{stroke:{c}}} .band.r{i}{{fill:{c}}}" for i, c in enumerate(PALETTE))

#: Height of the title, and of a row of the legend.
_TITLE, _ROW = 60, 20
#: Columns of the legend.
_COLUMNS = 3


def svg_file(chart: ET.Element, title: str, under: str, legend: Sequence[str]) -> bytes:
    """Return a chart as an SVG file on a white ground.

    Args:     chart: from `chart.line_chart`. under: a line under the title. legend: a name per
              line, in the order of the lines' runs.
    """
    top = _TITLE + _ROW * -(-len(legend) // _COLUMNS)
    height = HEIGHT + top + 8
    made = e(
        "svg",
        e("title", title),
        e("style", STYLE),
        e("rect", class_="ground", width=WIDTH, height=height),
        e("text", title, class_="title", x=LEFT - 42, y=24),
        e("text", under, class_="under", x=LEFT - 42, y=43),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=WIDTH,
        height=height,
    )
    made.extend(_key(run, name) for run, name in enumerate(legend))
    drawn = e("g", transform=f"translate(0 {top})", role="img")
    drawn.set("aria-label", chart.get("aria-label", ""))
    drawn.extend(list(chart))
    made.append(drawn)
    return ET.tostring(made, encoding="utf-8", xml_declaration=True) + b"\n"


def _key(run: int, name: str) -> ET.Element:
    """Return an entry of the legend."""
    row, column = divmod(run, _COLUMNS)
    x, y = LEFT + column * (RIGHT - LEFT) / _COLUMNS, _TITLE + _ROW * row + 6
    line = e("path", class_=f"line {color_of(run)}", d="M0 0H24")
    text = e("text", name, class_="key", x=30, y=0, dy="0.35em")
    return e("g", line, text, transform=f"translate({x:.1f} {y})")
