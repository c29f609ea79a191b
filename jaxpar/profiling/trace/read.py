"""A JAX profiler trace: taking one, and reading the kernels of each device and step from it.

A device's plane holds one line for each CUDA stream; other lines (XLA Ops, Steps) are derived from
those by tools, and not read. Which step a kernel belongs to, the host's plane says: each execution
of a module is an event there, and each launch within it has a correlation id, which the kernels
that it launched bear too. Ids grow with time, so a step's kernels are those from its first id on.
"""

import bisect
import contextlib
import dataclasses
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from jaxpar.profiling.trace import xspace

_EXECUTION = ":XLA GPU module"  # after the module's name; on the thread that launches the kernels
_GPU = re.compile(r"/device:GPU:(\d+)$")
_STREAM = re.compile(r"Stream #\d+")


class NoKernels(ValueError):
    """A trace without what is looked for; the message says why."""


@dataclass(frozen=True)
class ProfiledKernel:
    """A kernel, copy or memset on a stream: start and end in nanoseconds.

    `op` is its HLO instruction and `scope` that one's op_name. Inside a command buffer (a CUDA
    graph) the profiler knows neither: both are "" then, until `attribution` finds them. Its class
    and kind are set where the instruction tells them and the name does not: of a CPU.
    """

    name: str
    start: int
    end: int
    stream: str = ""
    op: str = ""
    scope: str = ""
    result: str = ""
    what: str = ""
    kind: str = ""

    @property
    def interval(self) -> tuple[int, int]:
        """(start, end)."""
        return self.start, self.end


@dataclass(frozen=True)
class KernelTrace:
    """The kernels of one module: of each device, of each of its executions, by start.

    Devices bear their numbers; where traces of several processes are joined, process:number.
    """

    module: str
    devices: dict[int | str, list[list[ProfiledKernel]]]
    on_gpu: bool = True
    device_kind: str = ""

    def without_first(self, steps: int) -> "KernelTrace":
        """The same without a device's first executions.

        Raises:   NoKernels when a device has no more than those.
        """
        if min(map(len, self.devices.values())) <= steps:
            raise NoKernels(f"{self.module} ran no more than the {steps} steps that are left out")
        rest = {device: each[steps:] for device, each in self.devices.items()}
        return dataclasses.replace(self, devices=rest)


@contextlib.contextmanager
def capture(folder: str | Path) -> Iterator[None]:
    """Trace what runs inside, without Python's own calls, into a folder."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tens of thousands of events, which slow the host
    with jax.profiler.trace(folder, profiler_options=options):
        yield


def newest_file(folder: str | Path) -> Path:
    """The trace file that was last written below a folder.

    Raises:   NoKernels when there is none.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise NoKernels(f"no *.xplane.pb below {folder}")
    return files[-1]


def read(path: str | Path, module: str = "") -> KernelTrace:
    """The kernels of a trace file.

    Args:     module: as HLO names it, jit_train_step; "": the one that the GPUs spent most time on.
    Raises:   NoKernels when there are no GPUs in it, or none that ran the module.
    """
    planes = planes_of(path)
    if not gpus_in(planes):
        raise NoKernels("the trace has no GPU's plane")
    return of_gpus(planes, module)


def planes_of(path: str | Path) -> dict[str, Any]:
    """The planes of a trace file by name.

    Raises:   NotATrace when the file cannot be read as one.
    """
    raw = xspace.read_bytes(path)
    try:
        data = ProfileData.from_serialized_xspace(raw)
    except RuntimeError as error:
        raise xspace.not_a_trace(path, error) from error
    return {plane.name: plane for plane in data.planes}


def gpus_in(planes: dict[str, Any]) -> dict[int, Any]:
    """The planes of GPUs among them, by number."""
    return {int(found[1]): planes[name] for name in planes if (found := _GPU.match(name))}


def of_gpus(planes: dict[str, Any], module: str) -> KernelTrace:
    """`read`, of the planes."""
    gpus = gpus_in(planes)
    kernels = {number: list(_launched(gpus[number])) for number in sorted(gpus)}
    module = module or _busiest(kernels)
    first_ids = _first_ids(planes.get("/host:CPU"), module)
    devices: dict[int | str, list[list[ProfiledKernel]]] = {}
    for number, launched in kernels.items():
        own = [(launch, kernel) for launch, name, kernel in launched if name == module]
        if not own:
            continue  # another process's, or idle
        if number not in first_ids:
            raise NoKernels(f"the host's plane has no execution of {module} on GPU {number}")
        devices[number] = _steps(own, first_ids[number])
    if not devices:
        raise NoKernels(f"no GPU ran {module} in the trace")
    name = stats_of(gpus[min(gpus)]).get("gpu_device_name", "")
    return KernelTrace(module, devices, device_kind=str(name))


def _launched(plane: Any) -> Iterator[tuple[int, str, ProfiledKernel]]:
    """Correlation id, module and kernel of each event on a stream of a device's plane."""
    for line in plane.lines:
        if not _STREAM.match(line.name):
            continue
        stream = line.name.split("(")[0]
        for event in line.events:
            stats = stats_of(event)
            start = int(event.start_ns)
            op = str(stats.get("hlo_op", ""))
            yield (
                int(stats.get("correlation_id", 0)),
                str(stats.get("hlo_module", "")),
                ProfiledKernel(
                    event.name,
                    start,
                    start + int(event.duration_ns),
                    stream,
                    "" if op.startswith("command_buffer") else op,
                    str(stats.get("name", "")),
                ),
            )


def stats_of(event: Any) -> dict[str, Any]:
    """The stats of an event, or of a plane, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the binding, once a process
        return dict(event.stats)


def _busiest(kernels: dict[int, list[tuple[int, str, ProfiledKernel]]]) -> str:
    """The module with the most device time. Copies that no module asked for have none."""
    time: Counter[str] = Counter()
    for launched in kernels.values():
        for _, module, kernel in launched:
            time[module] += kernel.end - kernel.start
    del time[""]
    if not time:
        raise NoKernels("no kernel in the trace belongs to an XLA module")
    return time.most_common(1)[0][0]


def _first_ids(host: Any, module: str) -> dict[int, list[int]]:
    """Of each device, the first correlation id of each execution of a module, ascending."""
    found: dict[int, list[int]] = defaultdict(list)
    for line in host.lines if host is not None else ():
        events = sorted(line.events, key=lambda event: event.start_ns)
        runs = [e for e in events if e.name == module + _EXECUTION]
        starts = [e.start_ns for e in runs]
        seen: set[int] = set()
        for event in events if runs else ():
            at = bisect.bisect_right(starts, event.start_ns) - 1
            if at < 0 or at in seen or event.start_ns > starts[at] + runs[at].duration_ns:
                continue
            stats = stats_of(event)
            if "correlation_id" in stats and "device_id" in stats:
                found[int(stats["device_id"])].append(int(stats["correlation_id"]))
                seen.add(at)
    return {device: sorted(ids) for device, ids in found.items()}


def _steps(
    own: list[tuple[int, ProfiledKernel]], first_ids: list[int]
) -> list[list[ProfiledKernel]]:
    """The kernels of each execution. Those launched before the trace's first are left out."""
    steps: list[list[ProfiledKernel]] = [[] for _ in first_ids]
    for launch, kernel in own:
        at = bisect.bisect_right(first_ids, launch) - 1
        if at >= 0:
            steps[at].append(kernel)
    return [sorted(step, key=lambda k: k.interval) for step in steps if step]
