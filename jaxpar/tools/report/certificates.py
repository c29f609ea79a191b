"""The report's section about a run's certificate: what was compared, and whether it applies."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from jaxpar.config.json_reader import UnreadableJson
from jaxpar.monitoring.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    Result,
    read_certificate,
)
from jaxpar.tools.report.elements import e, table
from jaxpar.tools.report.runs import RunRead

#: Most rows of all results. The file has them all.
MAX_ROWS = 500


def section(runs: Sequence[RunRead]) -> Element | None:
    """Return the certificate of each run; None if there is none."""
    parts = [part for run in runs for part in _of_run(run, several=len(runs) > 1)]
    return e("section", e("h2", "Certificate"), *parts) if parts else None


def _of_run(run: RunRead, *, several: bool) -> list[Element]:
    file, name = run.folder / CERTIFICATE_FILE, f"{run.name}: " if several else ""
    if not file.is_file():
        return []
    try:
        found = read_certificate(file)
    except (OSError, UnreadableJson) as error:
        return [e("p", f"{name}the certificate cannot be read: {error}")]
    c = found.conditions
    flags = ", ".join(f"{flag}={value}" for flag, value in c.flags.items())
    on = f"{c.gpu}, driver {c.driver}" if c.gpu else "CPU devices"
    about = f"{found.name}, on {on}, JAX {c.jax}, jaxlib {c.jaxlib}, Python {c.python}, "
    about += f"jaxpar {c.jaxpar} {c.commit}".rstrip() + (f", flags {flags}" if flags else "")
    parts = [
        e("p", f"{name}certificate {found}, in {found.cpu_seconds:,.0f} CPU seconds."),
        _applies(run),
        _by_check(found),
        e("p", about, class_="note"),
    ]
    if found.not_run:
        left = e("ul", *(e("li", str(result)) for result in found.not_run[:MAX_ROWS]))
        parts.append(e("details", e("summary", f"Not run: {len(found.not_run)}"), left))
    if found.failed:
        wrong = e("ul", *(e("li", str(one)) for one in found.failed[:MAX_ROWS]))
        parts.insert(2, wrong)
    return [*parts, e("details", e("summary", "All comparisons"), _all(found))]


def _applies(run: RunRead) -> Element:
    """Say what the run found at its latest start."""
    told = run.manifest.get("certificate")
    reasons = told.get("no_longer_applies") if isinstance(told, dict) else None
    if not isinstance(reasons, list):
        return e("p", "The run has not started since it was made.")
    if not reasons:
        return e("p", "It applied to the run at its latest start.")
    why = e("ul", *(e("li", str(reason)) for reason in reasons[:MAX_ROWS]))
    return e("div", e("p", e("strong", "It no longer applied at the latest start:")), why)


def _verdict(result: Result) -> str:
    return "ok" if result.passed else "MISMATCH"


def _nearest(result: Result) -> tuple[bool, float]:
    """Order results: those that failed last, and by how near they are to their bound."""
    share = result.distance / result.tolerance if result.tolerance else result.distance
    return not result.passed, share


def _by_check(found: Certificate) -> Element:
    """Return a row for each check and mesh: the result that is nearest its bound."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in found.results:
        if not result.not_run:
            groups.setdefault((result.check, result.mesh), []).append(result)
    rows = []
    for (check, mesh), results in groups.items():
        worst = max(results, key=_nearest)
        what = f"{worst.what} {worst.where}".rstrip()
        numbers = f"{worst.distance:.1e}", f"{worst.tolerance:.1e}", len(results)
        rows.append([check, mesh or "–", what, _verdict(worst), *numbers])
    names = ["check", "mesh", "nearest its bound", "verdict", "distance", "allowed", "compared"]
    return table(names, rows[:MAX_ROWS], texts=4)


def _all(found: Certificate) -> Element:
    ran = sorted((r for r in found.results if not r.not_run), key=_nearest, reverse=True)
    rows = []
    for r in ran[:MAX_ROWS]:
        numbers = f"{r.distance:.1e}", f"{r.tolerance:.1e}"
        rows.append([r.check, r.mesh or "–", r.what, r.where, _verdict(r), *numbers])
    names = ["check", "mesh", "what", "where", "verdict", "distance", "allowed"]
    return table(names, rows, texts=5)
