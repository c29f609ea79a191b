"""Draws histograms and bars as SVG, and the empty charts that the page's script draws."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from xml.etree.ElementTree import Element

from jaxpar.runtime.units import duration
from jaxpar.tools.report.elements import e

# --------------------------------------- Maps values to positions on an axis, and chooses its ticks


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Return the position of a value: 0 at `low`, 1 at `high`."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return at most about `most` round numbers on the axis, with their labels."""
        step = round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [(i * step, short(i * step, step)) for i in range(first, last + 1)]


def round_step(least: float) -> float:
    """Return the least of 1, 2 or 5 times a power of ten that is not below a number."""
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * f for f in (1, 2, 5, 10) if size * f >= least * (1 - 1e-9))


_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def short(value: float, precision: float | None = None) -> str:
    """Format a number briefly: 12k, 3.5M, 0.002, 4e-07.

    Args:     precision: resolution of the value; None: four digits.
    """
    if value == 0:
        return "0"
    # 4k on an axis, but 4,009 elsewhere.
    sizes = _SIZES if precision is not None or abs(value) >= 1e4 else ()
    size, letter = next(((s, text) for s, text in sizes if abs(value) >= s), (1.0, ""))
    value /= size
    if abs(value) < 1e-3:
        return f"{value:.3g}"
    exact = abs(value) * 1e-3 if precision is None else precision / size
    digits = max(-math.floor(math.log10(exact) + 1e-9), 0)
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + letter


#: Size of the drawing and bounds of the plot, in units of about a pixel.
WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 548, 16, 228

#: Number of colors. Further runs repeat them with other dashes.
COLOURS = 7


def across(scale: Scale, value: float) -> float:
    """Return the horizontal position of a value."""
    return LEFT + scale.at(value) * (RIGHT - LEFT)


def up(scale: Scale, value: float) -> float:
    """Return the vertical position of a value."""
    return BOTTOM - scale.at(value) * (BOTTOM - TOP)


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


def mark_sign(kind: str) -> Element:
    """Return a mark for the legend, which the script draws."""
    return e("svg", class_="sign", aria_hidden="true", data_sign=kind)


def line_sign(kind: str) -> Element:
    """Draw a kind of line for the legend."""
    if kind == "band":
        shape = e("path", class_="band", d="M0 1H28V11H0Z")
    elif kind == "dots":
        shape = e("g", e("circle", r=3, cx=14, cy=6), class_="dots")
    else:
        shape = e("path", class_="line", d="M0 6H28")
    return e("svg", shape, viewBox="0 0 28 12", class_="swatch gray", aria_hidden="true")


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


# ---- Draws a heat map of loads relative to their mean: rows of layers, columns of experts or steps


#: Bounds of the colors, relative to the mean. Between the middle two, a load counts as balanced.
BOUNDS = (1 / 8, 1 / 4, 1 / 2, 4 / 5, 5 / 4, 2, 4, 8)
_BOUND_TEXTS = ("1/8", "1/4", "1/2", "0.8", "1.25", "2", "4", "8")

#: Height of a row, and limits on the height of the map.
_ROW, _MIN_HEIGHT, _MAX_HEIGHT = 24, 60, 320

#: Below the map: the axis with its name, then the key of the colors.
_KEY_TOP, _KEY_WIDTH, _BELOW = 36, 37, 72


@dataclass(frozen=True)
class HeatMap:
    """A heat map."""

    title: str
    about: str
    """A description for screen readers."""
    values: Sequence[Sequence[float]]
    """By row, from the top."""
    texts: Sequence[str]
    """Tooltip of each row."""
    first_row: int
    """Number of the first row."""
    x: Scale
    """The columns divide it equally."""
    x_label: str


def heat_map(chart: HeatMap) -> Element:
    """Draw a heat map with its axes and the key of its colors."""
    rows = len(chart.values)
    height = min(max(_ROW * rows, _MIN_HEIGHT), _MAX_HEIGHT)
    made = drawing(chart.title, chart.about, {"class": "heat"}, TOP + height + _BELOW)
    top = lambda row: TOP + height * row / rows  # noqa: E731
    paths: dict[int, list[str]] = {}
    for row, values in enumerate(chart.values):
        for level, first, last in _runs(values):
            left, right = (_column(at, len(values)) for at in (first, last))
            box = f"M{left:.1f} {top(row):.1f}H{right:.1f}V{top(row + 1):.1f}H{left:.1f}Z"
            paths.setdefault(level, []).append(box)
    made.extend(e("path", class_=f"h{level}", d="".join(d)) for level, d in sorted(paths.items()))
    made.extend(_axes(chart, TOP + height, top))
    made.extend(_key(TOP + height + _KEY_TOP))
    for row, text in enumerate(chart.texts):
        place = {"x": LEFT, "width": RIGHT - LEFT, "y": f"{top(row):.1f}"}
        place["height"] = f"{height / rows:.1f}"
        made.append(e("rect", e("title", text), class_="over", **place))
    return made


def level_of(value: float) -> int:
    """Return the color of a load relative to the mean: 0 to len(BOUNDS)."""
    return bisect_right(BOUNDS, value)


def _runs(values: Sequence[float]) -> Iterator[tuple[int, int, int]]:
    """Yield the color of adjacent columns that share it, their first, and the one after them."""
    first = 0
    for level, run in groupby(map(level_of, values)):
        last = first + len(list(run))
        yield level, first, last
        first = last


def _column(at: int, columns: int) -> float:
    return LEFT + (RIGHT - LEFT) * at / columns


def _axes(chart: HeatMap, bottom: float, top: Callable[[float], float]) -> Iterator[Element]:
    last_row = chart.first_row + len(chart.values) - 1
    for value, text in _whole(Scale(chart.first_row, last_row + 0.5), 6):
        at = f"{top(value - chart.first_row + 0.5):.1f}"
        yield e("text", text, class_="ylabel", x=LEFT - 7, y=at, dy="0.35em")
    yield e("path", class_="axis", d=f"M{LEFT} {bottom:.1f}H{RIGHT}")
    for value, text in _whole(chart.x, 6):
        at = f"{across(chart.x, value):.1f}"
        yield e("path", class_="axis", d=f"M{at} {bottom:.1f}v5")
        yield e("text", text, class_="xlabel", x=at, y=f"{bottom + 20:.1f}")
    yield e("text", chart.x_label, class_="xname", x=RIGHT, y=f"{bottom + 46:.1f}")


def _whole(scale: Scale, most: int) -> list[tuple[float, str]]:
    return [(value, text) for value, text in scale.ticks(most) if value == round(value)]


def _key(top: float) -> Iterator[Element]:
    """Yield the colors side by side, with the bounds between them."""
    for level in range(len(BOUNDS) + 1):
        place = {"x": LEFT + _KEY_WIDTH * level, "width": _KEY_WIDTH - 1}
        yield e("rect", class_=f"h{level}", y=f"{top:.1f}", height=12, **place)
    for at, text in enumerate(_BOUND_TEXTS, 1):
        x = LEFT + _KEY_WIDTH * at
        yield e("text", text, class_="xlabel", x=x, y=f"{top + 30:.1f}")
