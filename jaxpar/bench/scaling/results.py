"""The results of a scaling measurement: rows with efficiencies, a table, a plot and a card."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.bench.scaling.points import ScalingPoint, count_of
from jaxpar.charts.chart import Chart, Line, line_chart
from jaxpar.charts.scale import Scale
from jaxpar.charts.standalone import svg_file
from jaxpar.config import Config
from jaxpar.config.serialize import to_json
from jaxpar.profiling.table import align_columns

#: Entries of a training card that all points share.
SHARED = ("jaxpar", "jax", "jaxlib", "platform", "processes", "gpu", "commit", "host")
#: Entries that a point's row does not repeat: those above, and the config, from its options.
_LEFT_OUT = (*SHARED, "config")

MISSING = "-"

type Row = dict[str, Any]


def row_of(point: ScalingPoint, measured: Mapping[str, Any] | None, error: str = "") -> Row:
    """Return a point's row: its fields, and the entries of its training card or the error."""
    row: Row = {
        "axis": point.axis,
        "scaling": point.mode,
        "devices": point.devices,
        "options": " ".join(point.flags),
    }
    if measured is None:
        return row | {"error": error}
    row["global_batch_size"] = measured["config"]["train"]["global_batch_size"]
    row["tokens_per_second"] = measured["tokens_per_second_per_device"] * point.devices
    return row | {name: value for name, value in measured.items() if name not in _LEFT_OUT}


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Add each row's efficiency: its tokens per second per device, relative to the fewest devices.

    `efficiency_against` is their number: the fewest that were measured for this axis and mode.
    """
    bases: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row["devices"]):
        if "error" not in row:
            bases.setdefault((row["axis"], row["scaling"]), row)
    made = []
    for row in rows:
        if "error" not in row:
            base = bases[row["axis"], row["scaling"]]
            share = row["tokens_per_second_per_device"] / base["tokens_per_second_per_device"]
            row = row | {"efficiency": share, "efficiency_against": base["devices"]}
        made.append(row)
    return made


def card(cfg: Config, first: Mapping[str, Any], steps: int, command: str, rows: Sequence[Row]):
    """Return the card: the conditions that the points share, the config, and the rows.

    Args:     first: the training card of the first point that was measured.
    """
    return {
        "what": "scaling",
        **{name: first.get(name) for name in SHARED},
        "command": command,
        "steps": steps,
        "rows": list(rows),
        "config_sha256": hashlib.sha256(to_json(cfg).encode()).hexdigest(),
        "config": dataclasses.asdict(cfg),
    }


def table(rows: Sequence[Row]) -> str:
    """Format a line for each row, and the errors below."""
    profiled = any(row.get("profile") for row in rows)
    title = ("axis", "scaling", "devices", "mesh", "sequences", "tokens/s/device", "ms per step")
    lines: list[Sequence[str]] = [
        (*title, "efficiency", "peak GiB", *(("exposed ms",) if profiled else ()))
    ]
    for row in rows:
        cells = [row["axis"], row["scaling"], str(row["devices"])]
        if "error" in row:
            cells += [MISSING] * (len(lines[0]) - len(cells))
        else:
            cells += [row["mesh"], f"{row['global_batch_size']:,}"]
            cells += [f"{row['tokens_per_second_per_device']:,.0f}"]
            cells += [f"{row['step_seconds']['median'] * 1e3:,.1f}", f"{row['efficiency']:.1%}"]
            cells += [f"{row['peak_memory_gib']:.1f}"]
        if profiled and "error" not in row:
            cells.append(f"{row['profile']['ms']['exposed']:,.1f}" if row["profile"] else MISSING)
        lines.append(cells)
    against = sorted({row["efficiency_against"] for row in rows if "error" not in row})
    notes = [f"efficiency: against {' or '.join(map(count_of, against))}"] if against else []
    notes += [
        f"failed: {row['scaling']}, {row['axis']}, {count_of(row['devices'])}: {row['error']}"
        for row in rows
        if "error" in row
    ]
    return "\n".join([align_columns(lines, left=(0, 1, 3)), *notes])


def plot(rows: Sequence[Row], under: str) -> bytes:
    """Draw the efficiency over the number of devices as SVG: a line for each axis and mode.

    Args:     rows: at least one without an error. under: what was measured, for below the title.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if "error" not in row:
            name = f"{row['scaling']}, {row['axis']}"
            lines.setdefault(name, []).append((row["devices"], 100 * row["efficiency"]))
    counts = sorted({x for points in lines.values() for x, _ in points})
    highest = max(y for points in lines.values() for _, y in points)
    x = Scale(counts[0], max(counts[-1], counts[0] * 2), log=True, marks=tuple(counts))
    against = min(row["efficiency_against"] for row in rows if "error" not in row)
    title = f"Scaling efficiency: tokens/s per device, % of {count_of(against)}"
    told = "; ".join(f"{name}: {points[-1][1]:.1f}%" for name, points in lines.items())
    about = f"On {counts[-1]:.0f} devices: {told}"
    drawn = [Line(run, sorted(points), "dots") for run, points in enumerate(lines.values())]
    chart = Chart(title, about, x, Scale(0, max(105.0, 1.05 * highest)), "devices", drawn)
    return svg_file(line_chart(chart), title, under, list(lines))
