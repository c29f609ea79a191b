"""How activations grow with the width: exponents, the table and the chart."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpar.charts.chart import Chart, Line, line_chart
from jaxpar.charts.scale import Scale
from jaxpar.charts.standalone import svg_file
from jaxpar.verification.coordinates.activations import KINDS, ActivationSizes
from jaxpar.verification.options import FLAT

#: Kinds that may shrink: µP's logits start smaller in wider models.
_MAY_SHRINK = ("logits",)


@dataclass(frozen=True)
class Growth:
    """The exponents of one kind: sizes are in proportion to width**exponent."""

    kind: str
    size: float
    """Of activations after the last step."""
    change: float
    """Of their change."""

    def verdict(self, tolerance: float = FLAT) -> str:
        """Return flat, grows or shrinks. An update that shrinks has no effect in wide models."""
        if max(self.size, self.change) > tolerance:
            return "grows"
        if self.change < -tolerance and self.kind not in _MAY_SHRINK:
            return "shrinks"
        return "flat"


def growth(found: Mapping[int, ActivationSizes]) -> list[Growth]:
    """Return the exponents of each kind, by least squares in logarithms.

    Args:     found: the sizes at two or more widths.
    """
    widths = np.log(list(found))

    def exponent(of: str, kind: str) -> float:
        sizes = [max(getattr(one, of)[kind], np.finfo(np.float32).tiny) for one in found.values()]
        return float(np.polyfit(widths, np.log(sizes), 1)[0])

    return [Growth(kind, exponent("end", kind), exponent("change", kind)) for kind in KINDS]


def verdicts(exponents: list[Growth], tolerance: float) -> list[str]:
    """Return which kinds grow, and which shrink: a line for each, or none."""
    by_verdict = {
        "grow with the width": [one.kind for one in exponents if one.verdict(tolerance) == "grows"],
        "change less in wider models": [
            one.kind for one in exponents if one.verdict(tolerance) == "shrinks"
        ],
    }
    return [f"{what}: {', '.join(kinds)}" for what, kinds in by_verdict.items() if kinds]


def table(found: Mapping[int, ActivationSizes], exponents: list[Growth], tolerance: float) -> str:
    """Return the sizes after the last step as a table: a row for each kind."""
    title = ["", *map(str, found), "exponent", "of the change", ""]
    rows = [title]
    for one in exponents:
        sizes = [f"{sizes.end[one.kind]:.4g}" for sizes in found.values()]
        rows.append(
            [one.kind, *sizes, f"{one.size:+.2f}", f"{one.change:+.2f}", one.verdict(tolerance)]
        )
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *numbers, last = [
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(cells, wide, strict=True))
        ]
        return "  ".join((first, *numbers, last.strip())).rstrip()

    return "\n".join(map(line, rows))


def chart(found: Mapping[int, ActivationSizes], title: str, under: str) -> bytes:
    """Draw the sizes against the width as an SVG file, both on logarithmic axes."""
    values = [sizes.end[kind] for sizes in found.values() for kind in KINDS]
    widths = list(found)
    x = dataclasses.replace(_axis(widths), marks=tuple(map(float, widths)))
    lines = [
        Line(i, [(width, sizes.end[kind]) for width, sizes in found.items()], "dots")
        for i, kind in enumerate(KINDS)
    ]
    made = line_chart(Chart(title, under, x, _axis(values), "d_model", lines))
    return svg_file(made, title, under, KINDS)


def _axis(values: list) -> Scale:
    low, high = max(min(values), 1e-12), max(values)
    margin = (high / low) ** 0.05 if high > low else 1.1
    return Scale(low / margin, high * margin, log=True)
