"""Count the spikes of loss_spikes.py: python scripts/measure/loss_spikes_report.py FOLDER

Prints a row for each variant. --picture writes the curves as SVG, --json the counts and curves.

A spike is a loss of more than 1.3 times the median of the 20 losses before it, or more than 1 nat
above it. A burst is a gradient norm of more than 5 times the median of the 20 before it. The first
step that can be one is the sixth. A spike without a burst is a hard batch; one with a burst comes
from the weights.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from line_chart import Chart, Line, Scale, line_chart, svg_file  # noqa: E402

#: Losses before a step whose median it is compared with, and the fewest that suffice.
WINDOW, FEWEST = 20, 5
#: A spike is above the median by this factor or this difference.
FACTOR, NATS = 1.3, 1.0
#: A burst is above the median by this factor.
BURST = 5.0

HEAD = """\
| variant | runs | spikes | with a burst | bursts | largest loss above the median | last 20 losses |
|---|---|---|---|---|---|---|"""


def above(losses: Sequence[float], step: int) -> float | None:
    """Return the loss of a step over the median of those before it; None if there are too few."""
    before = [v for v in losses[max(0, step - WINDOW) : step] if v == v]
    return None if len(before) < FEWEST else losses[step] - statistics.median(before)


def is_spike(losses: Sequence[float], step: int) -> bool:
    """Return whether a step's loss is a spike. NaN after enough losses always is."""
    difference = above(losses, step)
    if difference is None:
        return False
    median = losses[step] - difference
    return not (difference <= NATS and losses[step] <= FACTOR * median)


def spikes(losses: Sequence[float]) -> list[int]:
    """Return the steps, from 0, whose losses are spikes."""
    return [step for step in range(len(losses)) if is_spike(losses, step)]


def bursts(norms: Sequence[float]) -> list[int]:
    """Return the steps, from 0, whose gradient norms are bursts."""
    steps = range(FEWEST, len(norms))
    return [i for i in steps if norms[i] > BURST * statistics.median(norms[max(0, i - WINDOW) : i])]


def counts(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a variant's curves show.

    The end of a run is the mean of its last losses; `end_spread` is its standard deviation over
    the runs.
    """
    curves = found["curves"]
    losses = [curve["loss"] for curve in curves]
    spiked = {str(c["seed"]): spikes(c["loss"]) for c in curves}
    burst = {str(c["seed"]): bursts(c["grad_norm"]) for c in curves}
    ends = [statistics.fmean(loss[-WINDOW:]) for loss in losses]
    return {
        "runs": len(curves),
        "spikes": spiked,
        "bursts": burst,
        "spikes_with_a_burst": {s: sorted({*spiked[s]} & {*burst[s]}) for s in spiked},
        "largest_above_median": max(
            (above(loss, i) or 0.0) for loss in losses for i in range(FEWEST, len(loss))
        ),
        "largest_grad_norm": max(max(curve["grad_norm"][FEWEST:]) for curve in curves),
        "largest_change": max(max(curve["change"]) for curve in curves),
        "end": statistics.fmean(ends),
        "end_spread": statistics.stdev(ends) if len(ends) > 1 else 0.0,
    }


def row(name: str, count: dict[str, Any]) -> str:
    """Return a variant as a row below `HEAD`."""
    total = lambda by_seed: sum(map(len, count[by_seed].values()))  # noqa: E731
    cells = [name, count["runs"], *map(total, ("spikes", "spikes_with_a_burst", "bursts"))]
    cells += [f"{count['largest_above_median']:.2f}", f"{count['end']:.3f}"]
    return f"| {' | '.join(map(str, cells))} ({count['end_spread']:.3f}) |"


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    """Return a variant with its counts, and its losses and gradient norms to four digits."""
    digits = lambda values: [float(f"{value:.4g}") for value in values]  # noqa: E731
    curves = [
        {"seed": curve["seed"]} | {name: digits(curve[name]) for name in ("loss", "grad_norm")}
        for curve in found["curves"]
    ]
    return found | {"counts": counts(found), "curves": curves}


def picture(variants: Sequence[dict[str, Any]], under: str, last: int | None = None) -> bytes:
    """Draw the losses: for each variant the mean over its runs, and the range of the runs.

    Args:     under: a line below the title. last: the last step to draw; None draws all.
    """
    lines, ends = [], []
    for index, found in enumerate(variants):
        steps = list(zip(*(curve["loss"][:last] for curve in found["curves"]), strict=True))
        mean = [(i + 1.0, statistics.fmean(at)) for i, at in enumerate(steps)]
        band = [(i + 1.0, min(at), max(at)) for i, at in enumerate(steps)]
        lines.append(Line(index, mean, "line", band))
        ends += [value for at in steps for value in at]
    names = [f"{found['variant']}, {len(found['curves'])} runs" for found in variants]
    length = max(len(line.points) for line in lines)
    about = "; ".join(f"{n}: {li.points[-1][1]:.2f}" for n, li in zip(names, lines, strict=True))
    scales = Scale(1, length), Scale(min(ends) - 0.2, max(ends) + 0.2)
    title = "Loss of each step: mean and range of the runs"
    drawn = line_chart(Chart(title, f"In the end {about}", *scales, "steps", lines))
    return svg_file(drawn, title, under, names)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path, help="SVG file to write")
    parser.add_argument("--drawn", default="", help="variants in the picture, separated by commas")
    parser.add_argument("--under", default="", help="a line below the picture's title")
    parser.add_argument("--last", type=int, help="last step in the picture")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.json"))
    found = {each["variant"]: each for each in (json.loads(f.read_text()) for f in files)}
    print("\n".join([HEAD, *(row(name, counts(each)) for name, each in found.items())]))
    if options.json:
        lines = ",\n".join(json.dumps(rounded(each)) for each in found.values())
        options.json.write_text(f"[\n{lines}\n]\n")
    if options.picture:
        names = options.drawn.split(",") if options.drawn else list(found)
        drawn = picture([found[n] for n in names], options.under, options.last)
        options.picture.write_bytes(drawn)


if __name__ == "__main__":
    main()
