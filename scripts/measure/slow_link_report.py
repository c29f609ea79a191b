"""What slow_link.py shows: tables and curves."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from line_chart import Chart, Line, line_chart, scale_of, svg_file  # noqa: E402

#: Steps between two lines of a curve.
EVERY = 10


def picture(out: Path) -> bytes:
    """Draw the curves in OUT/curves.jsonl, as an SVG file."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in map(json.loads, (out / "curves.jsonl").read_text().splitlines()):
        found.setdefault(line["method"], []).append((line["step"], line["loss"]))
    lines = [Line(i, points) for i, points in enumerate(found.values())]
    points = [point for line in lines for point in line.points]
    start = max(x for x, _ in points) / 10  # the first tenth would squeeze the others
    scales = scale_of(x for x, _ in points), scale_of(y for x, y in points if x >= start)
    lines = [Line(ln.run, [p for p in ln.points if p[0] >= start]) for ln in lines]
    told = "; ".join(f"{name}: {curve[-1][1]:.3f} at the end" for name, curve in found.items())
    title = "Training loss by how replicas sum gradients"
    drawn = line_chart(Chart(title, told, *scales, "steps", lines))
    return svg_file(drawn, title, f"mean of {EVERY} steps", list(found))


def table_of(rows: dict[str, Any]) -> list[str]:
    """Return the lines of a Markdown table of the curves."""
    lines = ["| method | steps | last 5% | held out | MB per step and GPU | of float32 | s |"]
    lines.append("|---|---|---|---|---|---|---|")
    whole = rows.get("float32", {}).get("sent")
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | failed: {row['error'].splitlines()[0]} | | | | | |")
            continue
        share = f"1/{whole / row['sent']:.1f}" if whole else "-"
        lines.append(
            f"| {name} | {row['steps']:,} | {row['loss']:.4f} | {row['held_out']:.4f} "
            f"| {row['sent'] / 1e6:.3f} | {share} | {row['seconds']:.0f} |"
        )
    return lines


def table_of_times(rows: dict[str, Any]) -> list[str]:
    """Return the lines of a Markdown table of the times."""
    lines = ["| method | ms | fastest | slowest | outer ms | mean ms | MB per step and GPU "]
    lines[0] += "| temporaries, GiB |"
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | failed: {row['error'].splitlines()[0]} | | | | | | |")
            continue
        times = " | ".join(f"{row[key]:.1f}" for key in ("ms", "fastest_ms", "slowest_ms"))
        memory = row["temporary_gib"]
        there = "-" if memory is None else f"{memory:.2f}"
        mean, sent = f"{row['mean_ms']:.1f}", f"{row['sent'] / 1e6:.1f}"
        lines.append(f"| {name} | {times} | {_outer_ms(row)} | {mean} | {sent} | {there} |")
    return lines


def _outer_ms(row: dict[str, Any]) -> str:
    """Return the milliseconds of all outer steps, and of each fragment if there are several."""
    if "outer_steps" not in row:
        return "-"
    found = row["outer_steps"]
    each = [f"{1e3 * fragment['median']:.1f}" for fragment in found["fragments"]]
    parts = f" ({' + '.join(each)})" if len(each) > 1 else ""
    return f"{1e3 * found['outer_step_seconds']:.1f}{parts} every {found['every']}"
