"""Draws the fullest expert of runs over their steps, for docs/experiments.md.

python scripts/measure/expert_balance_chart.py NAME=RUN [NAME=RUN ...] --output FILE
"""

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from line_chart import Chart, Line, Scale, line_chart, svg_file  # noqa: E402


def points_of(folder: Path) -> list[tuple[float, float]]:
    """Return (step, load of the fullest expert relative to the mean) of each logged step."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [(r["step"], r["fullest_expert"]) for r in records if "fullest_expert" in r]


def picture(runs: dict[str, list[tuple[float, float]]], limit: float) -> bytes:
    """Draw a line for each run, and the limit."""
    last = max(step for points in runs.values() for step, _ in points)
    named = runs | {f"{limit}": [(1.0, limit), (last, limit)]}
    lines = [Line(i, points) for i, points in enumerate(named.values())]
    about = "; ".join(f"{name}: {points[-1][1]:.2f} at the end" for name, points in runs.items())
    most = max(value for points in runs.values() for _, value in points)
    scales = Scale(1, last), Scale(1.0, most)
    title = "Fullest expert of any layer, relative to the mean"
    drawn = line_chart(Chart(title, about, *scales, "steps", lines))
    return svg_file(drawn, title, "logged steps; 1 is balanced, 4 is every token", list(named))


def main() -> None:
    """Read the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    pairs = (run.partition("=") for run in options.runs)
    found = {name: points_of(Path(folder)) for name, _, folder in pairs}
    options.output.write_bytes(picture(found, options.limit))


if __name__ == "__main__":
    main()
