"""Draws a heat map of loads relative to their mean: rows of layers, columns of experts or steps."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.etree.ElementTree import Element

from jaxpar.tools.charts.chart import LEFT, RIGHT, TOP, across, drawing
from jaxpar.tools.charts.elements import e
from jaxpar.tools.charts.scale import Scale

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
