"""Draws histograms and bars as SVG, and the empty charts that the page's script draws."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from xml.etree.ElementTree import Element

from jaxpar.runtime.units import duration
from jaxpar.tools.charts.elements import e
from jaxpar.tools.charts.scale import Scale

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
