"""Formats a breakdown as tables of milliseconds per step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpar.runtime.tables import indented
from jaxpar.tools.profiling.trace.kernels import COMMUNICATION, PASSES, place_of

#: Rows of the table by pass, and longest names and shapes.
MAX_ROWS = 24
MAX_NAME_CHARS = 52
MAX_RESULT_CHARS = 40

#: CUDA graphs to name.
MAX_GRAPHS = 2


def table(profile: dict[str, Any], sent: dict[str, Any] | None = None) -> str:
    """Format the figures of `breakdown.profile` in aligned columns.

    Args:     sent: the card of `collective_bytes`, for the bytes of each collective.
    """
    parts = [_head(profile), _classes(profile)]
    if profile["launching"]:
        parts.append(_launching(profile["launching"], profile["between_steps_ms"]))
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
    text = indented(rows, left=(0, 4))
    if p["tensor_ms"] is not None:
        share = p["tensor_ms"] / step
        text += f"\n\n  tensor cores: {share:.1%} of the step in kernels that use them"
    return text


def _launching(found: dict[str, Any], between_ms: float | None) -> str:
    """Return how kernels were launched, and why nothing ran in the gaps."""
    calls = f"{found['calls']:,.0f} calls, {found['host_ms']:,.1f} ms of the host"
    if found["graphs"]:
        calls += f"; CUDA graphs: {found['graphs']:,.0f}, with {found['in_graphs']:,.0f} of "
        calls += f"{found['kernels']:,.0f} kernels"
    ahead = found["ahead_ms"]
    queue = f"a kernel starts {ahead['median']:,.1f} ms after its call (median), at least "
    queue += f"{ahead['least']:,.2f} ms"
    late, rest = found["late_ms"], found["queued_ms"]
    gaps = f"{found['gaps']:,.0f}: {late:,.2f} ms until the host launched, {rest:,.2f} ms else"
    if found["between_us"] is not None:
        gaps += f"; {found['between_us']:,.1f} us from one queued kernel to the next"
    rows = [("launches", calls), ("queue", queue), ("gaps", gaps)]
    graphs = [*found["by_graph"].items()]
    if graphs:
        texts = [f"{name} {g['kernels']:,.0f} kernels, {g['ms']:,.1f} ms" for name, g in graphs]
        left = found.get("distinct_graphs", len(graphs)) - MAX_GRAPHS
        more = [f"{left} more"] if left > 0 else []
        rows.insert(1, ("graphs", "; ".join(texts[:MAX_GRAPHS] + more)))
    if found["latency_us"] is not None:
        least, middle, most = (
            f"{found['latency_us'][n]:,.1f}" for n in ("least", "median", "most")
        )
        text = f"{middle} us (median; {least} to {most}) from a call to its kernel on an idle GPU"
        rows.append(("latency", text))
    if between_ms and found["between_steps_late"] is not None:
        text = f"{between_ms:,.1f} ms, {found['between_steps_late']:.0%} until the host launched"
        rows.append(("between steps", text))
    return indented(rows, left=(0, 1))


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
    return indented(rows)


def _scopes(p: dict[str, Any]) -> str:
    """Return compute by pass, then a row per pass and scope."""
    times: dict[tuple[str, str], float] = {}
    for row in p["by_scope_ms"]:
        if row["class"] != COMMUNICATION:
            place = row["pass"], row["scope"]
            times[place] = times.get(place, 0.0) + row["ms"]
    passes: dict[str, float] = {}
    for (phase, _), ms in times.items():
        passes[phase] = passes.get(phase, 0.0) + ms
    shown = [f"{phase} {passes[phase]:,.1f}" for phase in PASSES if phase in passes]
    if p["unattributed_ms"] >= 0.05:
        shown.append(f"unattributed {p['unattributed_ms']:,.1f}")
    rows = _classes_of_scopes(p, times)
    return "  compute by pass: " + "   ".join(shown) + "\n\n" + indented(rows, left=(0, 1))


def _classes_of_scopes(
    p: dict[str, Any], times: dict[tuple[str, str], float]
) -> list[tuple[str, ...]]:
    """Return rows with a column per class."""
    classes = [what for what in p["by_class"] if what != COMMUNICATION]
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in p["by_scope_ms"]:
        cells.setdefault((row["pass"], row["scope"]), {})[row["class"]] = row["ms"]
    rows: list[tuple[str, ...]] = [("pass", "scope", "ms", *classes)]
    for place, ms in sorted(times.items(), key=lambda item: -item[1])[:MAX_ROWS]:
        each = [f"{cells[place][c]:,.1f}" if c in cells[place] else "-" for c in classes]
        rows.append((place[0], place[1] or "-", f"{ms:,.1f}", *each))
    return rows


def _kernels(p: dict[str, Any]) -> str:
    """Return two lines per kernel: its figures and place, then its name, result and instruction."""
    top, step = p["top_kernels"], p["ms"]["step"]
    shown = [name for name in _COLUMNS if any(k.get(name) for k in top)]
    rows = [("ms", "of step", "count", "mean us", *(_COLUMNS[name][0] for name in shown), "place")]
    for k in top:
        numbers = [f"{k['ms']:,.1f}", f"{k['ms'] / step:.1%}"]
        numbers += [f"{k['count']:,.0f}", f"{k['mean_us']:,.1f}"]
        place = " ".join(filter(None, place_of(k["scope"]))) if k["scope"] else "-"
        cells = (_cell(name, k.get(name)) for name in shown)
        rows.append((*numbers, *cells, place))
    head, *lines = indented(rows, left=(len(rows[0]) - 1,)).splitlines()
    below = ["  ".join(filter(None, _names(k))) for k in top]
    pairs = (
        text for line, name in zip(lines, below, strict=True) for text in (line, "    " + name)
    )
    return "\n".join([head, *pairs])


def _names(k: dict[str, Any]) -> tuple[str, str, str]:
    """Return a kernel's name, result and instruction; on CPUs the name is the instruction's."""
    op = k["op"] if k["op"] != k["name"] else ""
    return _cut(k["name"], MAX_NAME_CHARS), _cut(k["result"], MAX_RESULT_CHARS), op


def _cell(name: str, value: Any) -> str:
    return "-" if value is None else _COLUMNS[name][1](value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


#: What is known about a kernel: title and format.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "occupancy": ("occ.", lambda value: f"{value:.0%}"),
    "waves": ("waves", digits),
    "tensor_cores": ("tensor", lambda uses: "yes" if uses else "no"),
}


# ---------------- Compares two profiles: milliseconds per step before and after, by class and scope


#: Rows of the table by scope.
COMPARED_ROWS = 30

#: Differences below this are not shown as a ratio: they are within what a trace resolves.
LEAST_MS = 0.05

type Times = Mapping[Any, float]


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return rows of two profiles (`breakdown.profile`) with both times.

    Each row has its names and "before", "after" and "difference" in milliseconds per step. Rows
    that only one profile has are 0 in the other. Scopes are in order of the difference's size.

    Returns:  {"step", "classes", "scopes"}.
    """
    both = [before, after]
    parts = [
        {(name,): p["ms"][name] for name in ("step", "compute", "communication", "exposed", "idle")}
        for p in both
    ]
    classes = [{(name,): row["ms"] for name, row in p["by_class"].items()} for p in both]
    scopes = sorted(_rows(*map(_by_scope, both)), key=lambda row: -abs(row["difference"]))
    return {
        "step": _rows(*parts),
        "classes": _rows(*classes),
        "scopes": scopes,
    }


def _by_scope(p: dict[str, Any]) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for row in p["by_scope_ms"]:
        if row["class"] != COMMUNICATION:
            place = row["pass"], row["scope"]
            found[place] = found.get(place, 0.0) + row["ms"]
    if p["unattributed_ms"]:
        found["unattributed", ""] = p["unattributed_ms"]
    return found


def _rows(before: Times, after: Times) -> list[dict[str, Any]]:
    names = dict.fromkeys([*before, *after])
    return [
        {
            "name": name,
            "before": (old := before.get(name, 0.0)),
            "after": (new := after.get(name, 0.0)),
            "difference": new - old,
        }
        for name in names
    ]


def in_words(found: dict[str, Any], titles: Sequence[str]) -> str:
    """Format a comparison.

    Args:     titles: what the two profiles are.
    """
    head = f"before  {titles[0]}\nafter   {titles[1]}"
    parts = [head, _table(found["step"], ("ms per step",)), _table(found["classes"], ("kernels",))]
    if found["scopes"]:
        parts.append(_table(found["scopes"][:COMPARED_ROWS], ("pass", "scope")))
    left = len(found["scopes"]) - COMPARED_ROWS
    if left > 0:
        parts.append(f"  {left} scopes with smaller differences are not shown; --json has them")
    return "\n\n".join(parts)


def _table(rows: Sequence[dict[str, Any]], names: tuple[str, ...]) -> str:
    cells: list[tuple[str, ...]] = [(*names, "before", "after", "difference", "ratio")]
    for row in rows:
        texts = (row["before"], row["after"])
        shown = [f"{ms:,.1f}" if ms else "-" for ms in texts]
        known = min(texts) >= LEAST_MS
        ratio = f"{row['after'] / row['before']:.3f}" if known else "-"
        cells.append(
            (*(n or "-" for n in row["name"]), *shown, f"{row['difference']:+,.1f}", ratio)
        )
    return indented(cells, left=tuple(range(len(names))))
