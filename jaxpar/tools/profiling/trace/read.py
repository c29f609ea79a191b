"""Reads the kernels of each device and step from traces of the JAX profiler.

A device's plane has one line per CUDA stream. Other lines (XLA Ops, Steps) are derived from those
and are not read. The host's plane assigns kernels to steps: it has an event for each execution of a
module, and each launch within it has a correlation ID, which its kernels have too. IDs increase
with time, so a step's kernels are those from its first ID to the next step's.
"""

import bisect
import dataclasses
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from jaxpar.tools.profiling.trace import xspace

# ----------------- How kernels were launched: their blocks and resources, and the calls of the host
#
# The profiler describes a kernel in one text, for kernels inside CUDA graphs too:
#
#     regs:168 static_shared:0 dynamic_shared:231424 grid:132,1,1 block:384,1,1 occ_pct:18.75
#
# The occupancy there is theoretical: the warps that fit on a multiprocessor, over the most that it
# can hold. The measured one takes Nsight Compute.
#
# Source:   openxla/xla, xla/backends/profiler/gpu/cupti_collector.cc.


#: Threads of a warp.
WARP = 32

#: Most threads of a multiprocessor, by compute capability. Source: CUDA C++ Programming Guide.
_MAX_THREADS = {"8.0": 2048, "8.6": 1536, "8.7": 1536, "8.9": 1536, "9.0": 2048, "10.0": 2048}
_MAX_THREADS |= {"10.3": 2048, "11.0": 1536, "12.0": 1536, "12.1": 1536}

_FIELD = re.compile(r"(\w+):([\d.,]+)")


@dataclass(frozen=True)
class LaunchShape:
    """The blocks and resources of a kernel.

    blocks      blocks of the grid.
    threads     threads of a block.
    registers   registers of a thread.
    shared      bytes of shared memory of a block, static and dynamic.
    occupancy   theoretical occupancy, from 0 to 1; None if unknown.
    """

    blocks: int
    threads: int
    registers: int
    shared: int
    occupancy: float | None


@dataclass(frozen=True)
class Chip:
    """What limits the blocks that run at once: multiprocessors, and the most threads of each."""

    multiprocessors: int
    max_threads: int


@dataclass(frozen=True)
class HostCall:
    """A call that launched kernels: start and end on the host in nanoseconds.

    graph: the name of the CUDA graph that it launched, whose kernels all have this call; "" for a
    single kernel.
    """

    start: int
    end: int
    graph: str = ""

    @property
    def is_graph(self) -> bool:
        """Whether it launched a CUDA graph."""
        return bool(self.graph)


def shape_of(details: Any) -> LaunchShape | None:
    """Parse the profiler's text about a kernel; None if it is missing or from another version."""
    found = dict(_FIELD.findall(str(details or "")))
    try:
        percent = float(found.get("occ_pct", 0))
        return LaunchShape(
            blocks=math.prod(map(int, found["grid"].split(","))),
            threads=math.prod(map(int, found["block"].split(","))),
            registers=int(found.get("regs", 0)),
            shared=int(found.get("static_shared", 0)) + int(found.get("dynamic_shared", 0)),
            occupancy=percent / 100 if 0 < percent <= 100 else None,
        )
    except (KeyError, ValueError):
        return None


def chip_of(stats: dict[str, Any]) -> Chip | None:
    """Return the limits of a GPU from the stats of its plane; None if it does not have them."""
    capability = f"{stats.get('compute_cap_major', 0)}.{stats.get('compute_cap_minor', 0)}"
    count, threads = int(stats.get("core_count", 0)), _MAX_THREADS.get(capability)
    return Chip(count, threads) if count > 0 and threads else None


def waves(shape: LaunchShape, chip: Chip) -> float | None:
    """Return how often a kernel's blocks fill the GPU; None if the occupancy is unknown.

    Below 1, some multiprocessors have nothing to do. A fraction above 1 is a last wave that does
    not fill it. Persistent kernels launch one wave and loop inside.
    """
    if not shape.occupancy or not shape.threads:
        return None
    threads = -(-shape.threads // WARP) * WARP
    at_once = max(1, round(shape.occupancy * chip.max_threads / threads)) * chip.multiprocessors
    return shape.blocks / at_once


_EXECUTION = ":XLA GPU module"  # after the module's name; on the thread that launches the kernels
_GPU = re.compile(r"/device:GPU:(\d+)$")
_GRAPH = re.compile(r"cu(?:da)?GraphLaunch\w*(?: \((\S+)\))?")
_STREAM = re.compile(r"Stream #\d+")


class NoKernels(ValueError):
    """Raised if a trace does not have the requested kernels."""


@dataclass(frozen=True)
class ProfiledKernel:
    """A kernel, copy or memset on a stream: start and end in nanoseconds.

    `op` is its HLO instruction and `scope` the instruction's op_name. Inside a command buffer (a
    CUDA graph) both are "" until `attribution` finds them. Class and kind are set only on CPUs,
    where they follow from the instruction and not from the name. `shape` and `call` are how it was
    launched, on GPUs; None if the trace does not say.
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
    shape: LaunchShape | None = None
    call: HostCall | None = None

    @property
    def interval(self) -> tuple[int, int]:
        """(start, end)."""
        return self.start, self.end


@dataclass(frozen=True)
class KernelTrace:
    """The kernels of one module by device and execution, sorted by start.

    Devices are numbers, or process:number if traces of several processes are joined.
    """

    module: str
    devices: dict[int | str, list[list[ProfiledKernel]]]
    on_gpu: bool = True
    device_kind: str = ""
    chip: Chip | None = None

    def without_first(self, steps: int) -> "KernelTrace":
        """Return the trace without the first executions of each device.

        Raises:   NoKernels if a device has no further ones.
        """
        if min(map(len, self.devices.values())) <= steps:
            raise NoKernels(f"{self.module} ran only the first {steps} steps, which are discarded")
        rest = {device: each[steps:] for device, each in self.devices.items()}
        return dataclasses.replace(self, devices=rest)


def newest_file(folder: str | Path) -> Path:
    """Return the newest trace file in a folder or its subfolders.

    Raises:   NoKernels if there is none.
    """
    found = Path(folder).rglob("*.xplane.pb")
    files = sorted(found, key=lambda file: (file.stat().st_mtime, file))
    if not files:
        raise NoKernels(f"no *.xplane.pb file below {folder}")
    return files[-1]


def read(path: str | Path, module: str = "") -> KernelTrace:
    """Read the kernels of a trace file.

    Args:     module: name in HLO, jit_train_step; "": the module with the most GPU time.
    Raises:   NoKernels if the trace has no GPU, or none that ran the module.
    """
    planes = planes_of(path)
    if not gpus_in(planes):
        raise NoKernels("the trace has no GPU plane")
    return of_gpus(planes, module)


def planes_of(path: str | Path) -> dict[str, Any]:
    """Read the planes of a trace file by name.

    Raises:   NotATrace if the file cannot be parsed.
    """
    raw = xspace.read_bytes(path)
    try:
        data = ProfileData.from_serialized_xspace(raw)
    except RuntimeError as error:
        raise xspace.not_a_trace(path, error) from error
    return {plane.name: plane for plane in data.planes}


def gpus_in(planes: dict[str, Any]) -> dict[int, Any]:
    """Return the planes of GPUs by number."""
    return {int(found[1]): planes[name] for name in planes if (found := _GPU.match(name))}


def of_gpus(planes: dict[str, Any], module: str) -> KernelTrace:
    """Read the kernels of a trace's planes, as `read` does."""
    gpus = gpus_in(planes)
    kernels = {number: list(_launched(gpus[number])) for number in sorted(gpus)}
    module = module or _busiest(kernels)
    host = planes.get("/host:CPU")
    first_ids, calls = _first_ids(host, module), _host_calls(host)
    devices: dict[int | str, list[list[ProfiledKernel]]] = {}
    for number, launched in kernels.items():
        own = [
            (launch, dataclasses.replace(kernel, call=calls.get((number, launch))))
            for launch, name, kernel in launched
            if name == module
        ]
        if not own:
            continue  # idle, or used by another process
        if number not in first_ids:
            raise NoKernels(f"the host's plane has no execution of {module} on GPU {number}")
        devices[number] = _steps(own, first_ids[number])
    if not devices:
        raise NoKernels(f"no GPU ran {module} in the trace")
    about = stats_of(gpus[min(gpus)])
    name = str(about.get("gpu_device_name", ""))
    return KernelTrace(module, devices, device_kind=name, chip=chip_of(about))


def _launched(plane: Any) -> Iterator[tuple[int, str, ProfiledKernel]]:
    """Yield correlation ID, module and kernel of each event on a device's streams."""
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
                    shape=shape_of(stats.get("kernel_details")),
                ),
            )


def stats_of(event: Any) -> dict[str, Any]:
    """Return the stats of an event or plane by name."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # raised by the binding once per process
        return dict(event.stats)


def _busiest(kernels: dict[int, list[tuple[int, str, ProfiledKernel]]]) -> str:
    """Return the module with the most device time. Some copies belong to no module."""
    time: Counter[str] = Counter()
    for launched in kernels.values():
        for _, module, kernel in launched:
            time[module] += kernel.end - kernel.start
    del time[""]
    if not time:
        raise NoKernels("no kernel in the trace belongs to an XLA module")
    return time.most_common(1)[0][0]


def _host_calls(host: Any) -> dict[tuple[int, int], HostCall]:
    """Return the calls that launched kernels, by device and correlation ID."""
    found: dict[tuple[int, int], HostCall] = {}
    for line in host.lines if host is not None else ():
        for event in line.events:
            stats = stats_of(event)
            if "correlation_id" in stats and "device_id" in stats:
                key = int(stats["device_id"]), int(stats["correlation_id"])
                start, graph = int(event.start_ns), _GRAPH.match(event.name)
                end = start + int(event.duration_ns)
                found[key] = HostCall(start, end, (graph[1] or "graph") if graph else "")
    return found


def _first_ids(host: Any, module: str) -> dict[int, list[int]]:
    """Return for each device the first correlation ID of each execution, ascending."""
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
    """Return the kernels of each execution, without those launched before the first one."""
    steps: list[list[ProfiledKernel]] = [[] for _ in first_ids]
    for launch, kernel in own:
        at = bisect.bisect_right(first_ids, launch) - 1
        if at >= 0:
            steps[at].append(kernel)
    return [sorted(step, key=lambda k: k.interval) for step in steps if step]
