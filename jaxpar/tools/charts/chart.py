"""Draws charts as self-contained SVG: lines with marks, histograms and bars."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from jaxpar.runtime.units import duration
from jaxpar.tools.charts.elements import e
from jaxpar.tools.charts.scale import Scale, short

#: Size of the drawing and bounds of the plot, in units of about a pixel.
WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 548, 16, 228

#: Number of colors. Further runs repeat them with other dashes.
COLOURS = 7

#: Marks of one kind that are closer than this are merged.
MARK_WIDTH = 5

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
class Tick:
    """A mark in a chart for an event of a run."""

    run: int
    kind: str
    x: float
    text: str


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
    ticks: Sequence[Tick] = ()
    attributes: tuple[tuple[str, object], ...] = ()
    """Attributes of the SVG element, for the script."""


def across(scale: Scale, value: float) -> float:
    """Return the horizontal position of a value."""
    return LEFT + scale.at(value) * (RIGHT - LEFT)


def up(scale: Scale, value: float) -> float:
    """Return the vertical position of a value."""
    return BOTTOM - scale.at(value) * (BOTTOM - TOP)


def line_chart(chart: Chart) -> Element:
    """Draw a line chart."""
    made = drawing(chart.title, chart.about, dict(chart.attributes))
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
    made.extend(_mark(chart, tick) for tick in thinned(chart.x, chart.ticks))
    made.append(e("path", class_="cross", d=f"M{LEFT} {TOP}V{BOTTOM}"))
    return made


def color_of(run: int) -> str:
    """Return the CSS class with the color of a run, counted from 0."""
    dashes = min(run // COLOURS, 2)
    return f"r{run % COLOURS}" + (f" dash{dashes}" if dashes else "")


def drawing(title: str, about: str, attributes: dict[str, object], height: int = HEIGHT) -> Element:
    """Return an empty drawing with its title and description."""
    return e(
        "svg",
        e("title", title),
        e("desc", about),
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label=f"{title}. {about}",
        **attributes,
    )


def axes(x: Scale, y: Scale, x_label: str) -> Iterable[Element]:
    """Yield the grid, the axes and their labels."""
    for value, text in y.ticks(6):
        at = f"{up(y, value):.1f}"
        yield e("path", class_="grid", d=f"M{LEFT} {at}H{RIGHT}")
        yield e("text", text, class_="ylabel", x=LEFT - 7, y=at, dy="0.35em")
    yield e("path", class_="axis", d=f"M{LEFT} {BOTTOM}H{RIGHT}")
    for value, text in x.ticks(6):
        at = f"{across(x, value):.1f}"
        yield e("path", class_="axis", d=f"M{at} {BOTTOM}v5")
        yield e("text", text, class_="xlabel", x=at, y=BOTTOM + 20)
    yield e("text", x_label, class_="xname", x=RIGHT, y=HEIGHT - 4)


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


# --------------------------------------------------------------------------------------- marks

#: Path of each kind of mark, from (0, 0) on the step axis; the plot is 212 high.
_SHAPES = {
    "restart": "M0 0V-212M-4 -205L0 -212L4 -205",
    "rewind": "M0 0V-212M7 -212H0L4 -208M0 -212L4 -216",
    "skipped": "M-4 -3L4 -11M4 -3L-4 -11",
    "failed": "M0 0V-8M-3 -11L3 -17M3 -11L-3 -17",
    "saved": "M0 0V-8",
}


def _mark(chart: Chart, tick: Tick) -> Element:
    place = f"translate({across(chart.x, tick.x):.1f} {BOTTOM})"
    kind = tick.kind.replace(" ", "-")
    shape = e("path", d=_SHAPES[tick.kind])
    color = color_of(tick.run)
    script = {"data-run": tick.run, "data-at": tick.x}
    named = e("title", tick.text)
    return e("g", named, shape, class_=f"mark {kind} {color}", transform=place, **script)


def mark_sign(kind: str) -> Element:
    """Draw a mark for the legend."""
    height = 212 if kind in ("restart", "rewind") else 20
    shape = e("path", class_=f"mark {kind.replace(' ', '-')}", d=_SHAPES[kind])
    box = f"-10 {-height - 5} 20 24" if height == 212 else "-10 -20 20 24"
    return e("svg", shape, viewBox=box, class_="sign", aria_hidden="true")


def line_sign(kind: str) -> Element:
    """Draw a kind of line for the legend."""
    if kind == "band":
        shape = e("path", class_="band", d="M0 1H28V11H0Z")
    elif kind == "dots":
        shape = e("g", e("circle", r=3, cx=14, cy=6), class_="dots")
    else:
        shape = e("path", class_="line", d="M0 6H28")
    return e("svg", shape, viewBox="0 0 28 12", class_="swatch gray", aria_hidden="true")


def thinned(x: Scale, ticks: Iterable[Tick]) -> list[Tick]:
    """Merge marks of the same run and kind that would overlap."""
    kept: dict[tuple[int, str, int], list[Tick]] = {}
    for tick in ticks:
        if x.low <= tick.x <= x.high:
            column = int(across(x, tick.x) / MARK_WIDTH)
            kept.setdefault((tick.run, tick.kind, column), []).append(tick)
    more = lambda ticks: f" (and {len(ticks) - 1} more here)" if len(ticks) > 1 else ""  # noqa: E731
    return [Tick(t[0].run, t[0].kind, t[0].x, t[0].text + more(t)) for t in kept.values()]


# ----------------------------------------------------------------------------- other drawings


def histogram(
    title: str, about: str, x_label: str, bars: Sequence[tuple[int, list[float], list[int]]]
):
    """Draw a histogram of each run, as shares of its own values, on one axis.

    Args:     bars: (run, edges, counts).
    """
    shares = [[count / (sum(counts) or 1) for count in counts] for _, _, counts in bars]
    x = Scale(min(edges[0] for _, edges, _ in bars), max(edges[-1] for _, edges, _ in bars))
    y = Scale(0, 105 * max(map(max, shares)))
    made = drawing(title, about, {})
    made.extend(axes(x, y, x_label))
    for (run, edges, _), heights in zip(bars, shares, strict=True):
        path = f"M{across(x, edges[0]):.1f} {BOTTOM}"
        for (left, right), share in zip(pairwise(edges), heights, strict=True):
            top = f"{up(y, 100 * share):.1f}"
            path += f"L{across(x, left):.1f} {top}L{across(x, right):.1f} {top}"
        path += f"L{across(x, edges[-1]):.1f} {BOTTOM}Z"
        made.append(e("path", class_=f"filled {color_of(run)}", d=path))
    return made


def share_bar(title: str, parts: Sequence[tuple[str, float]]) -> Element:
    """Draw one bar of labeled parts.

    Args:     parts: (name, seconds).
    """
    total = sum(spent for _, spent in parts) or 1.0
    about = ", ".join(f"{name} {spent / total:.1%}" for name, spent in parts)
    made, left = drawing(title, about, {"class": "bar"}, height=40), 0.0
    for name, spent in parts:
        width = WIDTH * spent / total
        text = f"{name}: {duration(spent)}, {spent / total:.1%}"
        place = {"x": f"{left:.1f}", "width": f"{max(width - 1, 0.5):.1f}"}
        made.append(e("rect", e("title", text), y=0, height=40, class_=part_class(name), **place))
        if width > 9 * len(name) + 12:
            made.append(e("text", name, class_="part", x=f"{left + 8:.1f}", y=20, dy="0.35em"))
        left += width
    return made


def part_class(name: str) -> str:
    """Return the CSS class with the color of a part of a run's time."""
    return "p-" + name.replace(" ", "-")
