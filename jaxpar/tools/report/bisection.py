"""Draws where two runs part: the page of `python -m jaxpar.certify --bisect`."""

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from xml.etree.ElementTree import Element

from jaxpar.certification.bisect import Bisection
from jaxpar.certification.layer_distances import POINTS
from jaxpar.certification.options import BisectOptions
from jaxpar.runtime.files.outputs import check_file, write
from jaxpar.tools.report import drawing
from jaxpar.tools.report.drawing import Scale, color_of
from jaxpar.tools.report.elements import e, table
from jaxpar.tools.report.page import document

#: The distance at which equal bits are drawn, in powers of ten.
FLOOR = -12

#: The gradients, as a line beside those of the points.
GRADIENTS = "gradients"


def output_of(options: BisectOptions) -> Path:
    """Return the file to write.

    Raises:   ConfigError if it is not an HTML file that can be written.
    """
    check_file("--output", options.output, "bisect.html", endings=(".html", ".htm"))
    return Path(options.output or Path(options.a, "bisect.html"))


def write_page(path: Path, found: Bisection) -> None:
    """Write the page, and print where it is."""
    write("--output", path, page(found, datetime.now().astimezone()))
    print(f"page        {path}; open it in a browser")


def page(found: Bisection, made: datetime) -> bytes:
    """Build the page."""
    when = f"{made:%Y-%m-%d %H:%M} {made.tzname() or ''}".strip()
    parts = [_facts(found), _differences(found), _picture(found), _notes(found)]
    main = e("main", *(part for part in parts if part is not None))
    header = e("header", e("h1", "Where two runs part"), e("p", when))
    return document(f"{found.a} and {found.b}", e("body", header, main))


def _facts(found: Bisection) -> Element:
    rows = [("A", found.a), ("B", found.b), ("cause", found.verdict)]
    if found.step:
        rows += [("first step", f"{found.step:,}, repeated from {found.begin:,}")]
        rows += [("first place", found.place or "unknown")]
        rows += [(n, f"{x:.9g} in A, {y:.9g} in B") for n, (x, y) in found.values.items()]
    return e("section", table(["", ""], rows, texts=2))


def _differences(found: Bisection) -> Element | None:
    if not found.differences:
        return None
    tried = {one.difference: one for one in found.tried}
    rows = []
    for one in found.differences:
        result = tried.get(one)
        if result is None or result.reason:
            why = one.reason or (result.reason if result is not None else "")
            gives, off = f"not tried: {why}", "–"
        else:
            gives = "the bits of B" if result.same else "other bits than B"
            off = f"{result.distance:.1e}"
        rows.append([one.kind, one.name, one.a, one.b, gives, off])
    names = ["difference", "of", "A", "B", "A's step with it gives", "loss, off by"]
    return e("section", e("h2", "What differs"), table(names, rows, texts=5))


def _picture(found: Bisection) -> Element | None:
    if not found.layers:
        return None
    lines = {p: [layer.forward.get(p, math.nan) for layer in found.layers[:-1]] for p in POINTS}
    lines[GRADIENTS] = [layer.backward for layer in found.layers[:-1]]
    lines = {name: of for name, of in lines.items() if any(map(math.isfinite, of))}
    legend = e("ul", class_="legend")
    for index, name in enumerate(lines):
        line = e("path", class_=f"line {color_of(index)}", d="M0 6H28")
        sign = e("svg", line, viewBox="0 0 28 12", class_="swatch", aria_hidden="true")
        legend.append(e("li", sign, name.replace("_", " ")))
    names = ["layer", *(name.replace("_", " ") for name in lines)]
    rows = []
    for at, layer in enumerate(found.layers):
        whole = [_at(of, at) for of in lines.values()]
        if at == len(found.layers) - 1:
            whole = ["–"] * (len(lines) - 1) + [f"{layer.backward:.1e}"]
        rows.append([layer.layer, *whole])
    about = " relative distance of A and B in the first step that differs, as a power of ten; equal"
    head = e("h3", "Distance by layer", e("span", f"{about} bits at {FLOOR}"))
    figure = e("figure", head, legend, _drawn(lines), table(names, rows), class_="wide")
    return e("section", figure)


def _at(values: Sequence[float], at: int) -> str:
    there = at < len(values) and math.isfinite(values[at])
    return f"{values[at]:.1e}" if there else "–"


def _drawn(lines: dict[str, list[float]]) -> Element:
    """Draw a line for each point, over the layers, on a logarithmic scale."""
    height = lambda d: max(math.log10(d), FLOOR) if d > 0 else FLOOR  # noqa: E731
    finite = [height(d) for of in lines.values() for d in of if math.isfinite(d)]
    count = max(len(of) for of in lines.values())
    x, y = Scale(0, max(count - 1, 1)), Scale(FLOOR, max(math.ceil(max(finite)), FLOOR + 1))
    title = "Distance by layer"
    made = drawing.drawing(title, f"{count} layers", {})
    made.extend(drawing.axes(x, y, "layer"))
    for index, of in enumerate(lines.values()):
        there = [
            f"{drawing.across(x, at):.1f} {drawing.up(y, height(d)):.1f}"
            for at, d in enumerate(of)
            if math.isfinite(d)
        ]
        kind = f"line {color_of(index)}"
        made.append(e("path", class_=kind, d="M" + "L".join(there) + ("h1" * (count == 1))))
    return made


def _notes(found: Bisection) -> Element | None:
    if not found.notes:
        return None
    return e("section", e("h2", "Notes"), e("ul", *(e("li", note) for note in found.notes)))
