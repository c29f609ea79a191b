"""How activations grow with the width: exponents, verdicts and the table."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpar.runtime.tables import lines
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
    return "\n".join(lines(rows, left=(0, len(title) - 1)))
