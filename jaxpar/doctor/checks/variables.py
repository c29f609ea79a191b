"""Variables that make a run slow, wrong or hard to understand, as data."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpar.doctor.checks.findings import Finding, Status


@dataclass(frozen=True)
class Variable:
    """One variable: the values that hurt, how much, why, and what to do."""

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
    Variable("NCCL_P2P_DISABLE", _on, "fail", "GPUs no longer reach one another directly: "
             "NVLink is not used", _unset("NCCL_P2P_DISABLE")),
    Variable("NCCL_P2P_LEVEL", _is("loc", "0"), "fail", "it forbids direct access between GPUs",
             _unset("NCCL_P2P_LEVEL")),
    Variable("NCCL_SHM_DISABLE", _on, "warn", "processes of a host go through the network where "
             "GPUs do not reach one another", _unset("NCCL_SHM_DISABLE")),
    Variable("NCCL_IB_DISABLE", _on, "warn", "hosts talk over TCP sockets in place of InfiniBand "
             "or RoCE", _unset("NCCL_IB_DISABLE")),
    Variable("NCCL_NET_GDR_LEVEL", _is("loc", "0"), "warn", "network cards no longer reach the "
             "GPUs' memory", _unset("NCCL_NET_GDR_LEVEL")),
    Variable("NCCL_NVLS_ENABLE", lambda value: value.strip() != "0", "warn", "NVLink multicast is "
             "on: on shared hosts it can take the GPUs out of service; jaxpar keeps it off",
             "set it to 0, or unset it: jaxpar sets 0"),
    Variable("NCCL_DEBUG", _is("info", "trace"), "warn", "NCCL writes a log for every process",
             "set it to WARN"),
    Variable("NCCL_ALGO", bool, "warn", "one algorithm for all sizes and collectives",
             _unset("NCCL_ALGO")),
    Variable("NCCL_PROTO", bool, "warn", "one protocol for all sizes: LL halves the bandwidth, "
             "and LL128 is unsafe on some hosts", _unset("NCCL_PROTO")),
    Variable("NCCL_MAX_NCHANNELS", lambda v: v.isdigit() and int(v) < 8, "warn",
             "few channels do not fill NVLink", _unset("NCCL_MAX_NCHANNELS")),
    Variable("NCCL_MAX_CTAS", lambda v: v.isdigit() and int(v) < 8, "warn",
             "few thread blocks do not fill NVLink", _unset("NCCL_MAX_CTAS")),
    Variable("CUDA_LAUNCH_BLOCKING", _on, "warn", "every kernel is waited for",
             _unset("CUDA_LAUNCH_BLOCKING")),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", _is("1"), "warn", "all streams share one hardware "
             "queue: less overlaps", _unset("CUDA_DEVICE_MAX_CONNECTIONS")),
    Variable("XLA_PYTHON_CLIENT_ALLOCATOR", _is("platform"), "warn", "every array is allocated by "
             "the driver, which waits for the device", _unset("XLA_PYTHON_CLIENT_ALLOCATOR")),
    Variable("XLA_PYTHON_CLIENT_PREALLOCATE", _is("false", "0"), "warn", "memory is taken piece "
             "by piece: fragments, and later failures", _unset("XLA_PYTHON_CLIENT_PREALLOCATE")),
    Variable("JAX_ENABLE_X64", _on, "warn", "numbers become 64 bits wide where nobody says "
             "otherwise", _unset("JAX_ENABLE_X64")),
    Variable("JAX_DISABLE_JIT", _on, "fail", "nothing is compiled", _unset("JAX_DISABLE_JIT")),
    Variable("JAX_DEBUG_NANS", _on, "warn", "every result is looked at, and steps are run twice",
             _unset("JAX_DEBUG_NANS")),
)  # fmt: skip

#: XLA flags that cost time whatever the model: name, values, why.
SLOW_FLAGS = (
    ("xla_dump_to", r".+", "XLA writes every program to disk"),
    ("xla_gpu_autotune_level", r"0", "matmuls are not tuned"),
    ("xla_gpu_deterministic_ops", r"true|1", "slower kernels, for the same bits each time"),
    ("xla_backend_optimization_level", r"0", "XLA does not optimize"),
    ("xla_gpu_enable_command_buffer", r"", "every kernel is launched by itself"),
)


def check(environment: Mapping[str, str]) -> list[Finding]:
    """A finding for each variable that is set to what hurts."""
    return [
        Finding(row.name, row.status, f"{row.name}={environment[row.name]}: {row.why}", row.remedy)
        for row in VARIABLES
        if row.name in environment and row.hurts(environment[row.name])
    ]


def flags_of(text: str) -> dict[str, str]:
    """XLA_FLAGS as names and values; a flag without a value is "true"."""
    pairs = re.findall(r"--(\w+)(?:=(\S*))?", text)
    return {name: value if value or f"--{name}=" in text else "true" for name, value in pairs}


def matches(pattern: str, value: str) -> bool:
    """Whether a flag has a value of SLOW_FLAGS."""
    return re.fullmatch(pattern, value) is not None
