"""How kernels were launched: their blocks and resources, and the calls of the host.

The profiler describes a kernel in one text, for kernels inside CUDA graphs too:

    regs:168 static_shared:0 dynamic_shared:231424 grid:132,1,1 block:384,1,1 occ_pct:18.75

The occupancy there is theoretical: the warps that fit on a multiprocessor, over the most that it
can hold. The measured one takes Nsight Compute.

Source:   openxla/xla, xla/backends/profiler/gpu/cupti_collector.cc.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

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
