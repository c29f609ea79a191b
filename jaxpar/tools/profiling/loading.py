"""Reads a profile from a run, the folder of a profile, or a single trace.

The optimized HLO is the file next to the trace, or else the copy of the program in the trace.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.monitoring import hlo, profile_folder
from jaxpar.runtime.files import gzipped
from jaxpar.tools.profiling.options import OPTION
from jaxpar.tools.profiling.trace import cpu_trace, xspace
from jaxpar.tools.profiling.trace import read as trace
from jaxpar.tools.profiling.trace.read import KernelTrace, NoKernels

_ENDINGS = (".xplane.pb", ".xplane.pb.gz")


@dataclass(frozen=True)
class LoadedProfile:
    """The kernels of the step, its program and facts about the run.

    buffers is XLA's memory plan (`memory.memory_of`); None if the trace has none. missing describes
    what was not found.
    """

    path: Path
    trace: KernelTrace
    module: hlo.Module | None
    hlo_text: str
    buffers: Any
    facts: profile_folder.ProfileFacts | None
    missing: tuple[str, ...]


def load(path: str, step: int | None = None) -> LoadedProfile:
    """Read a profile.

    Args:     path: a run folder, a profile's folder, or a file NAME.xplane.pb[.gz]. step: first
              step of the profile in a run; None: the latest.
    Raises:   ConfigError if there is no profile, or it cannot be read.
    """
    where = _profile_in(Path(path), step)
    files = _traces_in(where)
    facts = profile_folder.read_facts(where) if where.is_dir() else None
    missing: list[str] = []
    if facts is None and (where / profile_folder.FACTS_FILE).is_file():
        missing.append(f"{profile_folder.FACTS_FILE}: it is damaged or from another version")
    text = _hlo_beside(where, missing)
    try:
        programs = xspace.programs(files[0])
        name = hlo.module_name(text) if text else ""
        read = _read(files, name)
        program = xspace.program_of(programs.get(read.module, ()), text)
        text = text or (program.hlo_text() if program is not None else "")
        module = hlo.parse(text) if text else None
    except ValueError as error:
        fix = "trace the steps again: docs/profiling.md"
        raise ConfigError(OPTION, path, f"cannot be read: {error}", fix) from error
    if facts is not None and len(files) < facts.processes:
        missing.append(f"traces of {facts.processes - len(files)} of {facts.processes} processes")
    if module is None:
        missing.append("the step's HLO, and therefore scopes, FLOPs and bytes")
    buffers = program.buffers if program is not None else None
    return LoadedProfile(where, read, module, text, buffers, facts, tuple(missing))


def _profile_in(path: Path, step: int | None) -> Path:
    """Return the folder of the profile, or the trace file."""
    if not path.exists():
        raise ConfigError(OPTION, str(path), "does not exist", "give a run folder or a trace")
    profiles = profile_folder.profiles_of(path)
    if profiles:
        if step is not None and step not in profiles:
            rule = f"is not the first step of a profile in {path}"
            raise ConfigError("--step", step, rule, f"use one of {', '.join(map(str, profiles))}")
        return profiles[max(profiles) if step is None else step]
    if step is not None:
        rule = f"selects one of a run's profiles, but {path} has none"
        raise ConfigError("--step", step, rule, "remove it or give a run folder")
    return path


def _traces_in(where: Path) -> list[Path]:
    """Return the files of the newest trace in a folder, one per process, in order."""
    if where.is_file():
        if where.name.endswith(_ENDINGS):
            return [where]
        fix = "give a file NAME.xplane.pb or a folder"
        raise ConfigError(OPTION, str(where), "is not a trace file", fix)
    found = [file for file in where.rglob("*") if file.name.endswith(_ENDINGS)]
    if not found:
        fix = "set --profile.start N, or create RUN/profile.request during the run"
        raise ConfigError(OPTION, str(where), "contains no profile", fix)
    newest = max(found, key=lambda file: (file.stat().st_mtime, file)).parent
    return sorted((f for f in found if f.parent == newest), key=lambda f: (len(f.name), f))


def _hlo_beside(where: Path, missing: list[str]) -> str:
    """Return the HLO text saved with the trace, or "". Damaged files are added to `missing`."""
    if where.is_dir():
        names = [where / profile_folder.HLO_FILE]
    else:
        stem = where.name.partition(".xplane.pb")[0]
        names = [where.with_name(stem + ending) for ending in (".hlo.txt", ".hlo.txt.gz")]
    for name in filter(Path.is_file, names):
        try:
            text = gzipped.read_bytes(name, xspace.MAX_BYTES).decode()
            if hlo.module_name(text) and "\nENTRY " in text:
                return text
            missing.append(f"the HLO in {name.name}: the file is truncated")
        except (OSError, ValueError) as error:
            why = str(error).partition("\n")[0]
            missing.append(f"the HLO in {name.name}: the file cannot be read: {why}")
    return ""


def _read(files: list[Path], module: str) -> KernelTrace:
    """Read the traces of all processes as one, with devices named process:device."""
    # JAX names a file by its host, whose name may contain dots, such as 10.0.0.1.xplane.pb.
    traces = {file.name.partition(".xplane.pb")[0]: _read_one(file, module) for file in files}
    first = next(iter(traces.values()))
    if len(traces) == 1:
        return first
    joined: dict[int | str, list] = {
        f"{name.removeprefix('process_')}:{number}": steps
        for name, one in traces.items()
        for number, steps in one.devices.items()
    }
    return replace(first, devices=joined)


def _read_one(file: Path, module: str) -> KernelTrace:
    planes = trace.planes_of(file)
    if trace.gpus_in(planes):
        return trace.of_gpus(planes, module)
    try:
        return cpu_trace.read(planes.get("/host:CPU"), module)
    except NoKernels as error:
        raise NoKernels(f"{file}: {error}") from error
