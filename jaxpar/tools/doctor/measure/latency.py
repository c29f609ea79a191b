"""Measures the latency of small collectives over all devices: by NCCL and by XLA's own kernel.

XLA's kernel reads the other devices' buffers over NVLink, and needs devices of one process whose
number is a power of two. It adds in the order of the devices, so the sum is the same bits on each
of them. Two buffers alternate, so that no device overwrites what another still reads. It does not
use NVLink multicast. XLA 0.11 takes it for all-reduces by default, and for all-gathers if asked to.

The host launches each call, which takes longer than the call does on the GPUs: the figures are what
a program pays, not what the links need (docs/experiments/small_collectives.md).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxpar.monitoring.hlo.text import parse
from jaxpar.runtime.timing import Spread, time_calls
from jaxpar.tools.doctor.measure import bandwidth
from jaxpar.tools.doctor.progress import Tell, no_report

#: Collectives for which XLA has a kernel.
KINDS = ("all-reduce", "all-gather")

#: Bytes of the messages, as defined by nccl-tests.
SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)

_KERNELS = "xla_gpu_experimental_use_collective_kernels"

#: Options of the compiler by method.
METHODS: dict[str, dict[str, Any]] = {
    "NCCL": {_KERNELS: ""},
    "kernel": {_KERNELS: "COLLECTIVE_KERNEL_ALL_REDUCE,COLLECTIVE_KERNEL_ALL_GATHER"},
}

#: The kind of a fusion that is XLA's kernel, in the text of a compiled program.
KERNEL = '"__triton_collective"'


@dataclass(frozen=True)
class LatencyRow:
    """The time of one collective at one size.

    method  a key of METHODS.
    call    seconds per call; None if XLA does not compile this method here.
    """

    kind: str
    size: int
    method: str
    call: Spread | None


def measure(
    mesh: Mesh, repeats: int, patience: float, tell: Tell = no_report
) -> Iterator[LatencyRow]:
    """Time each collective at each size by each method.

    Args, Raises:   as `bandwidth.measure`.
    """
    n = mesh.size
    for kind, method in itertools.product(KINDS, METHODS):
        about = bandwidth.KINDS[kind]
        for size in SIZES:
            tell(f"{kind} of {size:,} bytes by {method}")
            whole = max(size // 4 // n, 1) * n
            elements, calls = whole // n if about.shards else whole, bandwidth.calls_for(size)
            program = bandwidth.compile_repeated(mesh, about, elements, calls, METHODS[method])
            call = None
            if uses_kernel(program.as_text() or "", calls) == (method == "kernel"):
                x = bandwidth.numbers(mesh, elements)
                call = time_calls(program, x, calls, repeats, patience).whole
            yield LatencyRow(kind, 4 * whole, method, call)


def uses_kernel(hlo_text: str, calls: int) -> bool:
    """Return whether all calls in a compiled program use XLA's kernel, rather than none.

    Raises:   LeftOut if some do and some do not.
    """
    module = parse(hlo_text)
    started = ("fusion", "fusion-start")
    fusions = (i for i in module.instructions.values() if i.opcode in started)
    found = sum(KERNEL in i.attributes for i in fusions)
    if found not in (0, calls):
        raise bandwidth.LeftOut(f"{found} of {calls} calls use XLA's kernel")
    return bool(found)
