"""A table of environment variables that make a run slow, wrong or hard to debug."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpar.tools.doctor.checks.findings import Finding, Status


@dataclass(frozen=True)
class Variable:
    """A variable: its harmful values, the severity, the reason and the remedy."""

    name: str
    hurts: Callable[[str], bool]
    status: Status
    why: str
    remedy: str


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _unset(name: str) -> str:
    return f"unset {name}"


#: NCCL's are from its documentation of environment variables (2.28), XLA's and JAX's from theirs.
VARIABLES = (
    Variable("NCCL_P2P_DISABLE", _on, "fail", "GPUs cannot access each other directly: "
             "NVLink is not used", _unset("NCCL_P2P_DISABLE")),
    Variable("NCCL_P2P_LEVEL", _is("loc", "0"), "fail", "it disables direct access between GPUs",
             _unset("NCCL_P2P_LEVEL")),
    Variable("NCCL_SHM_DISABLE", _on, "warn", "processes of a host use the network if their "
             "GPUs have no peer access", _unset("NCCL_SHM_DISABLE")),
    Variable("NCCL_IB_DISABLE", _on, "warn", "hosts use TCP sockets instead of InfiniBand "
             "or RoCE", _unset("NCCL_IB_DISABLE")),
    Variable("NCCL_NET_GDR_LEVEL", _is("loc", "0"), "warn", "network cards cannot access the "
             "GPUs' memory directly", _unset("NCCL_NET_GDR_LEVEL")),
    Variable("NCCL_NVLS_ENABLE", lambda value: value.strip() != "0", "warn", "NVLink multicast is "
             "on: on shared hosts it can take the GPUs out of service; jaxpar keeps it off",
             "set it to 0, or unset it: jaxpar sets 0"),
    Variable("NCCL_DEBUG", _is("info", "trace"), "warn", "NCCL writes a log for every process",
             "set it to WARN"),
    Variable("NCCL_ALGO", bool, "warn", "it forces one algorithm for all sizes and collectives",
             _unset("NCCL_ALGO")),
    Variable("NCCL_PROTO", bool, "warn", "it forces one protocol for all sizes: LL halves "
             "the bandwidth, and LL128 is unsafe on some hosts", _unset("NCCL_PROTO")),
    Variable("NCCL_MAX_NCHANNELS", lambda v: v.isdigit() and int(v) < 8, "warn",
             "too few channels to saturate NVLink", _unset("NCCL_MAX_NCHANNELS")),
    Variable("NCCL_MAX_CTAS", lambda v: v.isdigit() and int(v) < 8, "warn",
             "too few thread blocks to saturate NVLink", _unset("NCCL_MAX_CTAS")),
    Variable("CUDA_LAUNCH_BLOCKING", _on, "warn", "the host waits for every kernel",
             _unset("CUDA_LAUNCH_BLOCKING")),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", _is("1"), "warn", "all streams share one hardware "
             "queue, so less work overlaps", _unset("CUDA_DEVICE_MAX_CONNECTIONS")),
    Variable("XLA_PYTHON_CLIENT_ALLOCATOR", _is("platform"), "warn", "the driver allocates every "
             "array and waits for the device", _unset("XLA_PYTHON_CLIENT_ALLOCATOR")),
    Variable("XLA_PYTHON_CLIENT_PREALLOCATE", _is("false", "0"), "warn", "memory is allocated on "
             "demand: it fragments, and allocations fail later",
             _unset("XLA_PYTHON_CLIENT_PREALLOCATE")),
    Variable("JAX_ENABLE_X64", _on, "warn", "arrays without an explicit dtype have 64 bits",
             _unset("JAX_ENABLE_X64")),
    Variable("JAX_DISABLE_JIT", _on, "fail", "nothing is compiled", _unset("JAX_DISABLE_JIT")),
    Variable("JAX_DEBUG_NANS", _on, "warn", "every result is checked for NaN, and steps run twice",
             _unset("JAX_DEBUG_NANS")),
)  # fmt: skip

#: XLA flags that slow down every model: name, values, reason.
SLOW_FLAGS = (
    ("xla_dump_to", r".+", "XLA writes every program to disk"),
    ("xla_gpu_autotune_level", r"0", "matmuls are not tuned"),
    (
        "xla_gpu_deterministic_ops",
        r"true|1",
        "kernels are slower, in exchange for bitwise reproducibility",
    ),
    ("xla_backend_optimization_level", r"0", "XLA does not optimize"),
    ("xla_gpu_enable_command_buffer", r"", "every kernel is launched separately"),
)


def check(environment: Mapping[str, str]) -> list[Finding]:
    """Return a finding for each variable with a harmful value."""
    return [
        Finding(row.name, row.status, f"{row.name}={environment[row.name]}: {row.why}", row.remedy)
        for row in VARIABLES
        if row.name in environment and row.hurts(environment[row.name])
    ]


def flags_of(text: str) -> dict[str, str]:
    """Parse XLA_FLAGS into names and values; a flag without a value is "true"."""
    pairs = re.findall(r"--(\w+)(?:=(\S*))?", text)
    return {name: value if value or f"--{name}=" in text else "true" for name, value in pairs}


def matches(pattern: str, value: str) -> bool:
    """Return whether a flag's value matches a pattern of SLOW_FLAGS."""
    return re.fullmatch(pattern, value) is not None
