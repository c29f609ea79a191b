"""Builds the report's tables: key figures, predictions, config, environment, samples."""

import json
import math
from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

from jaxpar.config import Config, ConfigError
from jaxpar.config.layers import flat_values
from jaxpar.config.serialize import value_text
from jaxpar.config.values import to_values
from jaxpar.monitoring import profile_folder
from jaxpar.runtime.units import duration
from jaxpar.tools.bench.cards import differing_conditions
from jaxpar.tools.profiling.command import figures, gpu_of_trace
from jaxpar.tools.profiling.loading import LoadedProfile, load
from jaxpar.tools.report.drawing import color_of, short
from jaxpar.tools.report.elements import e, table
from jaxpar.tools.report.runs import RunRead

#: Entries of manifest.json that the environment shows, in this order.
ENVIRONMENT = {
    "jaxpar": "jaxpar",
    "commit": "commit",
    "jax": "JAX",
    "jaxlib": "jaxlib",
    "platform": "platform",
    "device": "devices",
    "processes": "processes",
    "mesh": "mesh",
    "parameters": "parameters",
    "adapters": "adapter parameters",
    "attention": "attention",
    "xla_flags": "XLA flags",
    "environment": "environment",
}


def swatch(index: int) -> Element:
    """Return a sample of a run's line."""
    line = e("path", class_=f"line {color_of(index)}", d="M0 6H28")
    return e("svg", line, viewBox="0 0 28 12", class_="swatch", aria_hidden="true")


def cards(runs: Sequence[RunRead]) -> Element:
    """Return the key figures of each run."""
    made = e("div", class_="cards")
    for index, run in enumerate(runs):
        facts = e("dl")
        for name, value, more in _figures(run):
            facts.append(
                e("div", e("dt", name), e("dd", value, e("small", more) if more else None))
            )
        made.append(e("section", e("h2", swatch(index), run.name), facts, class_="card"))
    return made


def _figures(run: RunRead) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each figure that a run has."""
    total = f"of {run.num_steps:,}" if run.num_steps else ""
    found = [("steps", f"{run.last_step:,}", total)]
    add = lambda name, value, more="": found.append((name, value, more))  # noqa: E731
    if "loss" in run.series:
        add("loss", f"{run.series['loss'].points()[-1].smooth:.4f}", "nats per token, smoothed")
    if "held_out_loss" in run.series:
        point = run.series["held_out_loss"].points()[-1]
        add("held-out loss", f"{run.last['held_out_loss']:.4f}", f"at step {point.step:,}")
    if "test_loss" in run.last:
        add("test loss", f"{run.last['test_loss']:.4f}", "nats per token, after the last step")
    if "tokens_seen" in run.last:
        add("tokens", short(run.last["tokens_seen"]))
    if (rate := run.speed.throughput) is not None:
        add("throughput", short(rate), "tokens/s/device, median")
    if (step := run.speed.step_time) is not None:
        devices = run.speed.devices
        on = f" on {devices:,} device{'s' if devices > 1 else ''}" if devices else ""
        add("step time", duration(step), f"median{on}")
    if run.speed.mfu:
        add("MFU", f"{run.speed.mfu.quantile(0.5):.1%}", "median, causal")
    if "memory_gib" in run.last:
        add("peak memory", f"{run.last['memory_gib']:.1f} GiB")
    if (spent := run.goodput) is not None and spent.total:
        add("goodput", f"{spent.fraction:.1%}", f"of {duration(spent.total)}, {spent.tries}")
    if run.last.get("skipped"):
        add("skipped updates", f"{run.last['skipped']:,.0f}")
    return found


def predicted(runs: Sequence[RunRead]) -> Element | None:
    """Return a table of the planner's predictions and the measurements."""
    rows = []
    for run in runs:
        if not run.predicted:
            continue
        measured = {
            "predicted_step_seconds": ("step time", "s", run.speed.step_time or math.nan),
            "predicted_memory_gib": ("peak memory", "GiB", run.last.get("memory_gib", math.nan)),
        }
        for key, (what, unit, value) in measured.items():
            if key in run.predicted:
                then = run.predicted[key]
                error = f"{then / value - 1:+.1%}" if value > 0 else ""
                was = "–" if math.isnan(value) else f"{value:.4g}"
                rows.append([run.name, f"{what}, {unit}", f"{then:.4g}", was, error])
    if not rows:
        return None
    names = ["run", "", "predicted", "measured", "error"]
    return e("section", e("h2", "Predicted and measured"), table(names, rows, texts=2))


def config(runs: Sequence[RunRead]) -> Element:
    """Return the config: how several runs differ, or how one differs from the defaults."""
    made = e("section", e("h2", "Config"))
    if len(runs) > 1:
        found = differing_conditions([run.manifest | {"config": run.config} for run in runs])
        found = {name.removeprefix("config."): row for name, row in found.items()}
        names = ["difference", *(run.name for run in runs)]
        made.append(
            table(names, [(name, *row) for name, row in found.items()], texts=len(names))
            if found
            else e("p", "The runs have the same config and conditions.")
        )
    else:
        rows = _changed(runs[0].config)
        made.append(table(["field", "value", "default"], rows, texts=3))
    for run in runs:
        text = json.dumps(run.config, indent=2) if run.config else "The run has no config.json."
        made.append(e("details", e("summary", f"Full config of {run.name}"), e("pre", text)))
    return made


def _changed(config: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the fields that differ from the defaults: (path, value, default)."""
    default = flat_values(to_values(Config()))
    mine = flat_values(config)
    changed = {path: v for path, v in mine.items() if v != default.get(path)}
    of = lambda path: value_text(path, default[path]) if path in default else "–"  # noqa: E731
    return [(path, value_text(path, v), of(path)) for path, v in changed.items()]


def environment(runs: Sequence[RunRead]) -> Element:
    """Return versions, devices, flags and commit, with a column per run."""
    rows = []
    for key, name in ENVIRONMENT.items():
        values = [_told(run.manifest.get(key)) for run in runs]
        if any(values):
            rows.append((name, *(value or "–" for value in values)))
    names = ["", *(run.name for run in runs)]
    shown = (
        table(names, rows, texts=len(names)) if rows else e("p", "The run has no manifest.json.")
    )
    return e("section", e("h2", "Environment"), shown, class_="environment")


def _told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int):
        return f"{value:,}" if value else ""
    return "" if value is None else str(value)


def samples(runs: Sequence[RunRead]) -> Element | None:
    """Return the latest samples."""
    made = e("section", e("h2", "Samples"))
    for run in runs:
        for sample in run.samples:
            head = e("p", f"{run.name}, step {sample['step']}", class_="note")
            text = e("pre", e("b", str(sample["prompt"])), str(sample["text"]), class_="sample")
            made.append(e("div", head, text))
    return made if len(made) > 1 else None


# ------------------------ Builds the report's section about profiles: where the time of a step goes


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
