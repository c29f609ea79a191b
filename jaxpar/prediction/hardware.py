"""Figures of GPUs and networks, each with its source.

Rates are per GPU and direction. A source that begins with "estimate" was not measured in this
project: it is a published figure times the share that a measured H200 reaches, unless it says more.
"""

import difflib
import re
from dataclasses import dataclass, replace

from jaxpar.config import ConfigError
from jaxpar.execution.xla_flag_table import ENVIRONMENT
from jaxpar.runtime.gpus.peaks import PEAK_FLOPS

GIB = 2**30

#: Share of a GPU's memory that XLA may allocate.
MEMORY_FRACTION = float(ENVIRONMENT["XLA_PYTHON_CLIENT_MEM_FRACTION"])


@dataclass(frozen=True)
class HardwareFigure:
    """A figure and its source."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU in its usual host.

    device_kind         its name in JAX.
    compute_capability  determines attention kernels and compilers.
    memory              bytes that XLA sees on the device.
    peak                dense bfloat16 FLOP/s, the reference of MFU.
    matmul              bfloat16 FLOP/s that a training step's large matmuls sustain.
    float8              the same for 8 bits; None if the GPU does not support it.
    bandwidth           bytes/s of a copy in device memory, read plus written bytes.
    memory_peak         bytes/s of device memory by the datasheet, the roof of profiles.
    nvlink              bytes/s to the other GPUs of the host, by the datasheet; of PCIe, where GPUs
                        have no NVLink.
    host_link           bytes/s to pinned host memory; the other direction is assumed equal.
    attention           FLOP/s of causal attention relative to an H200 (`rates.ATTENTION`).
    per_host            GPUs of a host.
    multiprocessors, l2_bytes, clock_ghz, links   used by `compiling.py`.
    """

    name: str
    device_kind: str
    compute_capability: str
    memory: HardwareFigure
    peak: HardwareFigure
    matmul: HardwareFigure
    float8: HardwareFigure | None
    bandwidth: HardwareFigure
    memory_peak: HardwareFigure
    nvlink: HardwareFigure
    host_link: HardwareFigure
    attention: HardwareFigure
    per_host: int = 8
    multiprocessors: int
    l2_bytes: int
    clock_ghz: float
    links: int

    @property
    def usable_bytes(self) -> float:
        """Bytes that a run may use."""
        return MEMORY_FRACTION * self.memory.value


H200_MATMUL_SHARE = 0.706  # 698 of 989 TFLOP/s
H200_COPY_SHARE = 0.87  # 4.18 of 4.8 TB/s

_SAME_CHIP = "estimate: the H200's, whose chip and power limit (700 W) it shares"
_SHARE = "estimate: the share of its peak that an H200 sustains"

H200 = Gpu(
    name="h200",
    device_kind="NVIDIA H200",
    compute_capability="9.0",
    memory=HardwareFigure(150_109_880_320, "XLA on an H200 with driver 580"),
    peak=HardwareFigure(PEAK_FLOPS["H200"], "NVIDIA H200 datasheet, dense"),
    matmul=HardwareFigure(
        698e12,
        "measured: matmul kernels of profiled steps at 700 W, 685 to 716 TFLOP/s less contention; "
        "isolated for more than a second, 642 to 681 (docs/experiments.md#power-limit)",
    ),
    float8=HardwareFigure(
        1230e12,
        "measured: 1.5B and 8B in float8, steps of a long run (docs/experiments.md#8b-in-float8)",
    ),
    bandwidth=HardwareFigure(
        4.18e12,
        "measured: device copy (docs/experiments.md#bandwidth-of-elementwise-kernels)",
    ),
    memory_peak=HardwareFigure(4.8e12, "NVIDIA H200 datasheet"),
    nvlink=HardwareFigure(450e9, "NVIDIA H200 datasheet: 900 GB/s for both directions"),
    host_link=HardwareFigure(
        51.7e9,
        "measured: copies of 134 MB out of a step (docs/experiments.md#values-in-host-memory)",
    ),
    attention=HardwareFigure(1.0, "measured: docs/benchmarks/attention-h200.json"),
    multiprocessors=132,
    l2_bytes=62_914_560,
    clock_ghz=1.98,
    links=18,
)

H100 = Gpu(
    name="h100",
    device_kind="NVIDIA H100 80GB HBM3",
    compute_capability="9.0",
    memory=HardwareFigure(
        79.2 * GIB, "estimate: 81,559 MiB by the driver, minus memory that XLA does not see"
    ),
    peak=HardwareFigure(PEAK_FLOPS["H100"], "NVIDIA H100 SXM datasheet, dense"),
    matmul=HardwareFigure(698e12, _SAME_CHIP),
    float8=HardwareFigure(1230e12, _SAME_CHIP),
    bandwidth=HardwareFigure(2.91e12, "estimate: 3.35 TB/s by the datasheet, times an H200's 0.87"),
    memory_peak=HardwareFigure(3.35e12, "NVIDIA H100 SXM datasheet"),
    nvlink=HardwareFigure(450e9, "NVIDIA H100 SXM datasheet: 900 GB/s for both directions"),
    host_link=HardwareFigure(51.7e9, "estimate: an H200's; PCIe 5 too"),
    attention=HardwareFigure(1.0, _SAME_CHIP),
    multiprocessors=132,
    l2_bytes=52_428_800,
    clock_ghz=1.98,
    links=18,
)

A100 = Gpu(
    name="a100",
    device_kind="NVIDIA A100-SXM4-80GB",
    compute_capability="8.0",
    memory=HardwareFigure(
        79.1 * GIB, "estimate: 81,920 MiB by the driver, minus memory that XLA does not see"
    ),
    peak=HardwareFigure(PEAK_FLOPS["A100"], "NVIDIA A100 datasheet, dense"),
    matmul=HardwareFigure(
        250e12, "estimate: 0.8 of the peak; the power limit affects an A100 less"
    ),
    float8=None,
    bandwidth=HardwareFigure(1.77e12, "estimate: 2.04 TB/s by the datasheet, times an H200's 0.87"),
    memory_peak=HardwareFigure(2.039e12, "NVIDIA A100 datasheet"),
    nvlink=HardwareFigure(300e9, "NVIDIA A100 datasheet: 600 GB/s for both directions"),
    host_link=HardwareFigure(25.8e9, "estimate: half of an H200's; PCIe 4"),
    attention=HardwareFigure(
        0.35, "estimate: 0.6 of the peak, as in FlashAttention-2 (2307.08691)"
    ),
    multiprocessors=108,
    l2_bytes=41_943_040,
    clock_ghz=1.41,
    links=12,
)

B200 = Gpu(
    name="b200",
    device_kind="NVIDIA B200",
    compute_capability="10.0",
    memory=HardwareFigure(
        178 * GIB, "estimate: 183,359 MiB by the driver, minus memory that XLA does not see"
    ),
    peak=HardwareFigure(PEAK_FLOPS["B200"], "NVIDIA B200 datasheet, dense"),
    matmul=HardwareFigure(PEAK_FLOPS["B200"] * H200_MATMUL_SHARE, _SHARE),
    float8=HardwareFigure(4500e12 * 0.62, _SHARE),
    bandwidth=HardwareFigure(8.0e12 * H200_COPY_SHARE, _SHARE),
    memory_peak=HardwareFigure(8.0e12, "NVIDIA B200 datasheet"),
    nvlink=HardwareFigure(900e9, "NVIDIA B200 datasheet: 1.8 TB/s for both directions"),
    host_link=HardwareFigure(51.7e9, "estimate: an H200's; PCIe 5 too"),
    attention=HardwareFigure(
        1.8, "estimate: cuDNN only; its kernels on this GPU were not measured"
    ),
    multiprocessors=148,
    l2_bytes=132_644_864,
    clock_ghz=1.965,
    links=18,
)

_PCIE4 = HardwareFigure(32e9, "PCIe 4 x16: 64 GB/s for both directions; no NVLink bridge assumed")
_PCIE5 = HardwareFigure(64e9, "PCIe 5 x16: 128 GB/s for both directions; no NVLink bridge assumed")

H100_PCIE = replace(
    H100,
    name="h100-pcie",
    device_kind="NVIDIA H100 PCIe",
    peak=HardwareFigure(PEAK_FLOPS["H100 PCIe"], "NVIDIA H100 PCIe datasheet, dense"),
    matmul=HardwareFigure(
        450e12, "estimate: 0.6 of the peak; its power limit (350 W) is half an H100 SXM's"
    ),
    float8=HardwareFigure(790e12, "estimate: an H200's ratio to bfloat16, 1.76"),
    bandwidth=HardwareFigure(1.77e12, "estimate: 2.04 TB/s by the datasheet, times an H200's 0.87"),
    memory_peak=HardwareFigure(2.04e12, "NVIDIA H100 PCIe product brief"),
    nvlink=_PCIE5,
    attention=HardwareFigure(0.65, "estimate: in proportion to its matmuls"),
    multiprocessors=114,
    clock_ghz=1.755,
    links=0,
)

A100_40 = replace(
    A100,
    name="a100-40",
    device_kind="NVIDIA A100-SXM4-40GB",
    memory=HardwareFigure(
        39.4 * GIB, "estimate: 40,960 MiB by the driver, minus memory that XLA does not see"
    ),
    bandwidth=HardwareFigure(
        1.35e12, "estimate: 1.555 TB/s by the datasheet, times an H200's 0.87"
    ),
    memory_peak=HardwareFigure(1.555e12, "NVIDIA A100 datasheet, 40 GB"),
)

A100_PCIE = replace(
    A100,
    name="a100-pcie",
    device_kind="NVIDIA A100 80GB PCIe",
    matmul=HardwareFigure(
        212e12, "estimate: 0.85 of an A100 SXM's; its power limit is 300 W rather than 400"
    ),
    bandwidth=HardwareFigure(
        1.68e12, "estimate: 1.935 TB/s by the datasheet, times an H200's 0.87"
    ),
    memory_peak=HardwareFigure(1.935e12, "NVIDIA A100 datasheet"),
    nvlink=_PCIE4,
    attention=HardwareFigure(0.3, "estimate: 0.85 of an A100 SXM's"),
    links=0,
)

L40S = Gpu(
    name="l40s",
    device_kind="NVIDIA L40S",
    compute_capability="8.9",
    memory=HardwareFigure(
        44.4 * GIB, "estimate: 46,068 MiB by the driver, minus memory that XLA does not see"
    ),
    peak=HardwareFigure(PEAK_FLOPS["L40S"], "NVIDIA L40S datasheet, dense"),
    matmul=HardwareFigure(PEAK_FLOPS["L40S"] * H200_MATMUL_SHARE, _SHARE),
    float8=HardwareFigure(733e12 * 0.62, _SHARE),
    bandwidth=HardwareFigure(
        0.75e12, "estimate: 0.864 TB/s by the datasheet, times an H200's 0.87"
    ),
    memory_peak=HardwareFigure(0.864e12, "NVIDIA L40S datasheet"),
    nvlink=_PCIE4,
    host_link=A100.host_link,
    attention=HardwareFigure(0.35, "estimate: an A100's, whose matmuls are as fast"),
    multiprocessors=142,
    l2_bytes=100_663_296,
    clock_ghz=2.52,
    links=0,
)

L4 = Gpu(
    name="l4",
    device_kind="NVIDIA L4",
    compute_capability="8.9",
    memory=HardwareFigure(
        22 * GIB, "estimate: 23,034 MiB by the driver, minus memory that XLA does not see"
    ),
    peak=HardwareFigure(PEAK_FLOPS["L4"], "NVIDIA L4 datasheet, dense"),
    matmul=HardwareFigure(
        60e12, "estimate: half of the peak, which its power limit of 72 W does not sustain"
    ),
    float8=HardwareFigure(106e12, "estimate: an H200's ratio to bfloat16, 1.76"),
    bandwidth=HardwareFigure(0.26e12, "estimate: 0.3 TB/s by the datasheet, times an H200's 0.87"),
    memory_peak=HardwareFigure(0.3e12, "NVIDIA L4 datasheet"),
    nvlink=_PCIE4,
    host_link=A100.host_link,
    attention=HardwareFigure(0.084, "estimate: an A100's, in proportion to its matmuls"),
    multiprocessors=58,
    l2_bytes=50_331_648,
    clock_ghz=2.04,
    links=0,
)

GPUS = {gpu.name: gpu for gpu in (H200, H100, A100, B200, H100_PCIE, A100_40, A100_PCIE, L40S, L4)}


@dataclass(frozen=True)
class Network:
    """The network between hosts.

    bandwidth   sustained bytes/s of one GPU to other hosts, in each direction.
    """

    name: str
    bandwidth: HardwareFigure


def network_of_speed(name: str, gigabits: float) -> Network:
    """Return a network of which a part of the nominal speed, Gbit/s per GPU, is sustained."""
    source = f"estimate: 0.8 of {gigabits:g} Gbit/s per GPU; no network was measured"
    return Network(name, HardwareFigure(0.8 * gigabits * 1e9 / 8, source))


NETWORKS = {
    network.name: network
    for network in (
        network_of_speed("ib400", 400),
        network_of_speed("ib200", 200),
        network_of_speed("ib800", 800),
        network_of_speed("roce400", 400),
        network_of_speed("efa", 400),
        network_of_speed("eth100", 12.5),
    )
}


def gpu_named(name: str) -> Gpu:
    """Return a GPU by name.

    Raises:   ConfigError for a GPU that is not in the table.
    """
    return _find(GPUS, name, "--gpu", "GPU")


def network_named(name: str) -> Network:
    """Return a network by name, or by its speed: "10gbit" per GPU.

    Raises:   ConfigError for a network that is not in the table.
    """
    speed = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)gbit", name.lower())
    if speed and float(speed[1]) > 0:
        return network_of_speed(name.lower(), float(speed[1]))
    return _find(NETWORKS, name, "--network", "network")


def _find(table: dict, name: str, option: str, what: str):
    if name.lower() in table:
        return table[name.lower()]
    near = difflib.get_close_matches(name.lower(), table, n=1)
    rule = f"is not a known {what}; known are {', '.join(table)}"
    fix = f"use {option} {near[0]}" if near else "use one of those that is no better than yours"
    raise ConfigError(option, name, rule, fix)


def gpu_of_kind(device_kind: str) -> Gpu | None:
    """Return the GPU with this name in JAX; None if unknown."""
    return next((gpu for gpu in GPUS.values() if gpu.device_kind == device_kind), None)
