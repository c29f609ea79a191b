"""Compares two profiles: milliseconds per step before and after, by class and scope."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.runtime.tables import indented
from jaxpar.tools.profiling.trace.kernels import COMMUNICATION

#: Rows of the table by scope.
MAX_ROWS = 30

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
        parts.append(_table(found["scopes"][:MAX_ROWS], ("pass", "scope")))
    left = len(found["scopes"]) - MAX_ROWS
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
