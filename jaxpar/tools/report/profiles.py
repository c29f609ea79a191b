"""Builds the report's section about profiles: where the time of a step goes."""

from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

from jaxpar.config import ConfigError
from jaxpar.monitoring import profile_folder
from jaxpar.tools.charts.elements import e, table
from jaxpar.tools.profiling.command import figures, gpu_of_trace
from jaxpar.tools.profiling.loading import LoadedProfile, load
from jaxpar.tools.report.runs import RunRead

#: Bytes of traces up to which a profile is read: some ten seconds.
MAX_BYTES = 100_000_000

#: Rows of the table by scope.
MAX_ROWS = 16


def section(runs: Sequence[RunRead]) -> Element | None:
    """Return the latest profile of each run; None if there is none."""
    parts = [part for run in runs for part in _of_run(run, several=len(runs) > 1)]
    return e("section", e("h2", "Profile of a step"), *parts) if parts else None


def _of_run(run: RunRead, *, several: bool) -> list[Element]:
    profiles = profile_folder.profiles_of(run.folder)
    if not profiles:
        return []
    step, where = max(profiles.items())
    name = f"{run.name}: " if several else ""
    read = f"python -m jaxpar.profile {run.folder} --step {step}"
    if sum(file.stat().st_size for file in where.rglob("*.xplane.pb*")) > MAX_BYTES:
        return [e("p", f"{name}the profile of step {step} is large; to read it: {read}")]
    try:
        loaded = load(str(where))
        gpu = gpu_of_trace(loaded)
        found = figures(loaded, gpu, top=0)
    except (ConfigError, OSError) as error:
        why = error.rule if isinstance(error, ConfigError) else str(error)
        return [e("p", f"{name}the profile of step {step} cannot be read: {why}")]
    parts = [e("p", name + _head(found, loaded)), _scopes(found)]
    return [*parts, e("p", f"More: {read}")]


def _head(found: dict[str, Any], loaded: LoadedProfile) -> str:
    ms, about = found["ms"], loaded.facts
    last = about.first_step + about.num_steps - 1 if about else 0
    text = f"Steps {about.first_step} to {last}: " if about else ""
    parts = [f"{name} {ms[name]:,.1f} ms" for name in ("step", "compute", "exposed", "idle")]
    text += ", ".join(parts)
    if found["tensor_ms"] is not None:
        text += f". Tensor cores: {found['tensor_ms'] / ms['step']:.1%} of the step"
    return text + "."


def _scopes(found: dict[str, Any]) -> Element:
    """Return a table of the passes and scopes with most time."""
    times: dict[tuple[str, str], float] = {}
    for row in found["by_scope_ms"]:
        place = row["pass"], row["scope"]
        times[place] = times.get(place, 0.0) + row["ms"]
    ordered = sorted(times.items(), key=lambda item: -item[1])[:MAX_ROWS]
    step = found["ms"]["step"]
    return table(
        ["pass", "scope", "ms", "of step"],
        [[*place, f"{ms:,.1f}", f"{ms / step:.1%}"] for place, ms in ordered],
        texts=2,
    )
