"""The work of `python -m jaxpar.profile`."""

import dataclasses
import textwrap
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.options import check_ranges
from jaxpar.monitoring.hlo import collective_bytes
from jaxpar.monitoring.profile_folder import profiles_of
from jaxpar.prediction.hardware import Gpu, gpu_named, gpu_of_kind
from jaxpar.runtime.files import outputs
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.stages import stage
from jaxpar.tools.profiling import breakdown, sections, table
from jaxpar.tools.profiling.loading import LoadedProfile, load
from jaxpar.tools.profiling.memory import ProgramMemory, memory_of, of_sums
from jaxpar.tools.profiling.options import OPTION, ProfileOptions
from jaxpar.tools.profiling.trace.kernels import ATTENTION

#: Most other profiles of a run to name.
MAX_OTHERS = 10


def show(options: ProfileOptions) -> None:
    """Print a profile, or the comparison of two, and write its figures."""
    check(options)
    if len(options.paths) > 1:
        with stage(f"reading {' and '.join(options.paths)}"):
            both = compared(options)
        print(both.pop("text"))
        return _write(options, both)
    with stage(f"reading {options.paths[0]}"):
        loaded = load(options.paths[0], options.step)
    found = figures(loaded, gpu_of(options, loaded), options.top)
    sent, memory = sent_by(loaded), memory_of(loaded.buffers, loaded.module)
    if memory is None and loaded.facts is not None:
        memory = of_sums(loaded.facts.memory)
    print(in_words(loaded, found, sent, memory, options.top))
    return _write(options, record(loaded, found, sent, memory))


def _write(options: ProfileOptions, figures: dict[str, Any]) -> None:
    if options.json:
        outputs.write_json("--json", options.json, figures)


def check(options: ProfileOptions) -> None:
    """Check the options.

    Raises:   ConfigError if an option is invalid.
    """
    check_ranges(options)
    if options.gpu:
        gpu_named(options.gpu)
    check_file("--json", options.json or None, "profile.json", in_existing_folder=True)
    if len(options.paths) > 2:
        rule = "is a third profile, and two are compared"
        raise ConfigError(OPTION, options.paths[2], rule, "remove it")
    if len(options.paths) > 1 and options.step is not None:
        fix = "remove it; give folders such as RUN/profiles/step_00000100"
        rule = "applies to a single profile, and two are compared"
        raise ConfigError("--step", options.step, rule, fix)


def gpu_of(options: ProfileOptions, loaded: LoadedProfile) -> Gpu | None:
    """Return the GPU whose peaks to use; None for CPUs and unknown GPUs."""
    return gpu_named(options.gpu) if options.gpu else gpu_of_trace(loaded)


def gpu_of_trace(loaded: LoadedProfile) -> Gpu | None:
    """Return the GPU that a trace or the run names; None for CPUs and unknown GPUs."""
    kind = loaded.trace.device_kind or (loaded.facts.device_kind if loaded.facts else "")
    return gpu_of_kind(kind)


def figures(loaded: LoadedProfile, gpu: Gpu | None, top: int) -> dict[str, Any]:
    """Return all figures of a profile: those of `breakdown.profile`, rates and the straggler."""
    facts = loaded.facts
    attention = facts.attention_flops_per_device if facts is not None else None
    try:
        found = breakdown.profile(loaded.trace, loaded.module or "", top)
    except (ValueError, LookupError) as error:
        rule = f"is damaged: {error}" if isinstance(error, LookupError) else str(error)
        fix = "trace the steps again: docs/profiling.md"
        raise ConfigError(OPTION, str(loaded.path), rule, fix) from error
    if facts is not None:
        flops = facts.flops / facts.devices
        rate = flops / found["ms"]["step"] * 1e3
        share = rate / gpu.peak.value if gpu is not None else None
        found["model"] = {"flops": flops, "flops_per_second": rate, "mfu": share}
        kernels = found["by_class"].get(ATTENTION)
        if kernels and attention:
            rate = attention / kernels["ms"] * 1e3
            found["attention"] = {"flops": attention, "flops_per_second": rate}
    found["straggler"] = sections.straggler(found)
    return found


def sent_by(loaded: LoadedProfile) -> dict[str, Any] | None:
    """Return what a device sends in a step; None if the HLO is missing, damaged or lacks it."""
    text = loaded.hlo_text
    try:
        return collective_bytes(text).card() if text else None
    except (ValueError, LookupError):  # damaged: an operand is missing
        return None


def in_words(
    loaded: LoadedProfile,
    found: dict[str, Any],
    sent: dict[str, Any] | None,
    memory: ProgramMemory | None,
    top: int,
) -> str:
    """Format a profile as text."""
    parts = ["\n".join(filter(None, (_head(loaded), _others(loaded))))]
    if not loaded.trace.on_gpu:
        parts.append(textwrap.fill(f"note: {sections.CPU_NOTE}", 100))
    parts += [f"missing: {text}" for text in loaded.missing]
    parts.append(table.table(found, sent))
    parts.append(sections.rates(found, loaded.facts))
    parts.append(sections.devices(found))
    parts.append(sections.memory(memory, loaded.module, top))
    return "\n\n".join(filter(None, parts))


def _head(loaded: LoadedProfile) -> str:
    facts = loaded.facts
    if facts is None:
        kind = f", {loaded.trace.device_kind}" if loaded.trace.device_kind else ""
        return f"{loaded.path}: {loaded.trace.module}{kind}"
    last = facts.first_step + facts.num_steps - 1
    where = f"{facts.devices} x {facts.device_kind}, mesh {facts.mesh}"
    return f"{loaded.path}: steps {facts.first_step} to {last} on {where}"


def _others(loaded: LoadedProfile) -> str:
    """Return a line with the other profiles of the run; "" if there is none."""
    steps = [n for n, path in profiles_of(loaded.path.parent.parent).items() if path != loaded.path]
    shown = ", ".join(map(str, steps[:MAX_OTHERS])) + ", ..." * (len(steps) > MAX_OTHERS)
    return f"other profiles of the run, for --step: {shown}" if steps else ""


def compared(options: ProfileOptions) -> dict[str, Any]:
    """Return the comparison of two profiles: its rows, and the text under "text"."""
    both, titles = [], []
    for path in options.paths:
        loaded = load(path)
        both.append(figures(loaded, gpu_of(options, loaded), options.top))
        titles.append(_head(loaded))
    found = table.compare(*both)
    return found | {"text": table.in_words(found, titles)}


def record(
    loaded: LoadedProfile,
    found: dict[str, Any],
    sent: dict[str, Any] | None,
    memory: ProgramMemory | None,
) -> dict[str, Any]:
    """Return a profile for --json."""
    return {
        "path": str(loaded.path),
        "facts": dataclasses.asdict(loaded.facts) if loaded.facts else None,
        "missing": list(loaded.missing),
        "profile": found,
        "collective_bytes": sent,
        "memory": dataclasses.asdict(memory) if memory else None,
    }
