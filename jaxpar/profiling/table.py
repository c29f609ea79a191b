"""Formats a breakdown as tables of milliseconds per step."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxpar.profiling.trace.kernels import COMMUNICATION
from jaxpar.profiling.trace.scopes import PASSES

#: Rows of the table by pass, and longest scopes and names.
MAX_ROWS = 24
MAX_SCOPE_CHARS = 60
MAX_NAME_CHARS = 50


def table(profile: dict[str, Any], sent: dict[str, Any] | None = None) -> str:
    """Format the figures of `breakdown.profile` in aligned columns.

    Args:     sent: the card of `collective_bytes`, for the bytes of each collective.
    """
    parts = [_head(profile), _classes(profile)]
    if profile["communication"]:
        parts.append(_collectives(profile, (sent or {}).get("kinds", {})))
    if profile["by_scope_ms"]:
        parts.append(_scopes(profile))
    parts.append(_kernels(profile))
    return "\n\n".join(parts)


def digits(value: float) -> str:
    """Format a number with about three digits: 1,924, 17.6, 0.34, 0.0012."""
    places = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{places}f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def amount(num_bytes: float) -> str:
    """Format bytes sent, in powers of 1000 like link speeds: 22.5 GB, 4.61 kB."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if num_bytes >= 10**power:
            return f"{digits(num_bytes / 10**power)} {unit}"
    return f"{num_bytes:.0f} B"


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Align rows of cells in columns: those in `left` to the left, others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(["", *cells]).rstrip())
    return "\n".join(lines)


def _head(p: dict[str, Any]) -> str:
    ms, worst = p["ms"], p["worst_device_ms"]
    several = p["devices"] > 1
    beside = lambda name: f" ({worst[name]:,.1f})" if several else ""  # noqa: E731
    of = f", mean of {p['devices']} devices (worst)" if several else ""
    parts = [
        f"step {ms['step']:,.1f}",
        f"compute {ms['compute']:,.1f}",
        f"exposed communication {ms['exposed']:,.1f}{beside('exposed')}, {p['exposed_share']:.1%}",
        f"idle {ms['idle']:,.1f}{beside('idle')}",
    ]
    if p["between_steps_ms"] is not None:
        parts.append(f"between steps {p['between_steps_ms']:,.1f}")
    return f"profile of {p['steps']} steps{of}, ms per step\n  " + "   ".join(parts)


def _classes(p: dict[str, Any]) -> str:
    step, rows = p["ms"]["step"], [("kernels", "ms", "of step", "count", "")]
    for what, row in p["by_class"].items():
        note = f"{p['ms']['hidden']:,.1f} of it hidden" if what == COMMUNICATION else ""
        share = f"{row['ms'] / step:.1%}"
        rows.append((what, f"{row['ms']:,.1f}", share, f"{row['count']:,.0f}", note))
    idle = p["ms"]["idle"]
    rows.append(("idle", f"{idle:,.1f}", f"{idle / step:.1%}", "", ""))
    return align_columns(rows, left=(0, 4))


def _collectives(p: dict[str, Any], sent: dict[str, dict[str, int]]) -> str:
    rows = [("collective", "ms", "exposed", "count", "sent", "rate")]
    for kind, row in p["communication"].items():
        size = sent[kind]["bytes"] if kind in sent else None
        rows.append(
            (
                kind,
                f"{row['ms']:,.1f}",
                f"{row['exposed_ms']:,.1f}",
                f"{row['count']:,.0f}",
                "-" if size is None else amount(size),
                "-" if size is None else f"{amount(size / row['ms'] * 1e3)}/s",
            )
        )
    return align_columns(rows)


def _scopes(p: dict[str, Any]) -> str:
    """Return compute by pass, then a row per pass and scope with a column per class."""
    classes = [what for what in p["by_class"] if what != COMMUNICATION]
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in p["by_scope_ms"]:
        if row["class"] != COMMUNICATION:
            cells.setdefault((row["pass"], row["scope"]), {})[row["class"]] = row["ms"]
    ordered = sorted(cells.items(), key=lambda item: -sum(item[1].values()))
    rows = [("pass", "scope", "ms", *classes)]
    for (phase, scope), times in ordered[:MAX_ROWS]:
        each = [f"{times[what]:,.1f}" if what in times else "-" for what in classes]
        rows.append((phase, scope or "-", f"{sum(times.values()):,.1f}", *each))
    passes: dict[str, float] = {}
    for (phase, _), times in ordered:
        passes[phase] = passes.get(phase, 0.0) + sum(times.values())
    shown = [f"{phase} {passes[phase]:,.1f}" for phase in PASSES if phase in passes]
    if p["unattributed_ms"] >= 0.05:
        shown.append(f"unattributed {p['unattributed_ms']:,.1f}")
    return "  compute by pass: " + "   ".join(shown) + "\n\n" + align_columns(rows, left=(0, 1))


def _kernels(p: dict[str, Any]) -> str:
    """Return the kernels, with their costs and roofline shares if known."""
    costs = [name for name in _COSTS if any(k.get(name) for k in p["top_kernels"])]
    rows = [
        ("ms", "count", "mean us", *(_COSTS[name][0] for name in costs), "kernel", "result, where")
    ]
    for k in p["top_kernels"]:
        scope = k["scope"]
        where = scope if len(scope) <= MAX_SCOPE_CHARS else "..." + scope[-MAX_SCOPE_CHARS:]
        numbers = [f"{k['ms']:,.1f}", f"{k['count']:,.0f}", f"{k['mean_us']:,.1f}"]
        numbers += [_COSTS[name][1](k[name]) if k.get(name) else "-" for name in costs]
        name = k["name"] if len(k["name"]) <= MAX_NAME_CHARS else k["name"][:MAX_NAME_CHARS] + "..."
        rows.append((*numbers, name, "  ".join(filter(None, (k["result"], where)))))
    return align_columns(rows, left=(len(rows[0]) - 2, len(rows[0]) - 1))


#: A kernel's costs (`roofline.py`): title and format.
_COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "flops": ("GFLOP", lambda value: digits(value / 1e9)),
    "bytes": ("MB", lambda value: digits(value / 1e6)),
    "roofline": ("roofline", lambda value: f"{value:.0%}"),
}
