"""Draws metrics of a run over its steps, for docs/recipes.

python scripts/recipes/draw_curve.py RUN --title TITLE --under TEXT --output FILE
  [--metrics loss held_out_loss]
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "measure")]

from line_chart import Chart, Line, line_chart, scale_of, svg_file  # noqa: E402


def points_of(run: Path, metric: str) -> list[tuple[float, float]]:
    """Return (step, value) of each record of a run that has the metric."""
    records = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [(r["step"], r[metric]) for r in records if metric in r]


def picture(run: Path, metrics: list[str], title: str, under: str) -> bytes:
    """Draw a line for each metric; those of held-out data have dots."""
    curves = {name.replace("_", " "): points_of(run, name) for name in metrics}
    lines = [
        Line(i, points, "dots" if name.startswith("held out") else "line")
        for i, (name, points) in enumerate(curves.items())
    ]
    steps, values = zip(*(point for points in curves.values() for point in points), strict=True)
    about = "; ".join(f"{name}: {points[-1][1]:.3f} at the end" for name, points in curves.items())
    drawn = line_chart(Chart(title, about, scale_of(steps), scale_of(values), "step", lines))
    return svg_file(drawn, title, under, list(curves))


def main() -> None:
    """Read the command line and write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--title", required=True)
    parser.add_argument("--under", required=True)
    parser.add_argument("--metrics", nargs="+", default=["loss", "held_out_loss"])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.write_bytes(picture(options.run, options.metrics, options.title, options.under))


if __name__ == "__main__":
    main()
