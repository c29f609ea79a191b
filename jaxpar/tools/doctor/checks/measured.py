"""Checks of what was measured. Each check is a function from figures to findings."""

import statistics
from collections.abc import Mapping, Sequence

from jaxpar.prediction.hardware import Gpu, gpu_of_kind
from jaxpar.runtime.gpus.nvml import GpuLoad
from jaxpar.tools.doctor.checks.findings import Finding, failed, passed, skipped, warned
from jaxpar.tools.doctor.measure import links as links_of
from jaxpar.tools.doctor.measure.bandwidth import BandwidthRow
from jaxpar.tools.doctor.measure.links import ACROSS, WITHIN, HostRow, Link

#: Shares of what a healthy GPU of the kind reaches (prediction/hardware.py) below which a rate is
#: low, or far too low. A matmul repeated for seconds reached 0.92 to 0.98 of it
#: (docs/experiments.md#power-limit).
LOW, FAR_TOO_LOW = 0.85, 0.6

#: A GPU below this share of the other GPUs' median is slow.
SLOW_GPU = 0.92

#: Share of NVLink's speed by the data sheet that large collectives should reach; two healthy
#: H200s reached 0.57 to 0.60 (docs/troubleshooting.md), without NVLink multicast.
OF_NVLINK = 0.5

#: Bytes of a message that fills NVLink.
LARGE_MESSAGE = 64 << 20

#: Collectives that are limited by the links. All-to-all and permute have other traffic patterns,
#: and training uses no broadcast.
HELD_AGAINST_NVLINK = ("all-reduce", "all-gather", "reduce-scatter")

#: Bytes/s to and from pinned memory below which PCIe is too slow: half of gen 4 x16.
MIN_TRANSFER_RATE = 12e9

type Rates = Mapping[tuple[str, str], Sequence[float]]


def wrong_collectives(wrong: Sequence[str], verified: int) -> Finding:
    """Check that every collective's result was correct.

    Args:     verified: number of results compared.
    """
    if not verified:
        return skipped("collectives", "one device")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        remedy = "do not train here: try NCCL_P2P_DISABLE=1 and other GPUs to find the faulty part"
        return failed("collectives", "; ".join(wrong[:3]) + more, remedy)
    return passed("collectives", f"{verified} results, all correct")


def bus_bandwidth(rows: Sequence[BandwidthRow], gpu: Gpu | None, one_host: bool) -> list[Finding]:
    """Check the largest messages against NVLink's speed."""
    check = "bus bandwidth"
    if gpu is None or not one_host or not rows:
        why = (
            "no data sheet for these devices"
            if gpu is None
            else "no expected value for several hosts"
        )
        return [skipped(check, why)]
    largest = max(row.size for row in rows)
    if largest <= LARGE_MESSAGE - 4 * rows[0].devices:  # rounded down to whole numbers on each
        return [skipped(check, "no message of 64 MiB or more was sent")]
    held = [r for r in rows if r.kind in HELD_AGAINST_NVLINK and r.size == largest]
    told = [f"{r.kind} {r.bus / 1e9:.0f} GB/s" for r in held]
    low = [r for r in held if r.bus < OF_NVLINK * gpu.nvlink.value]
    said = f"{', '.join(told)} of {gpu.nvlink.value / 1e9:.0f} by the data sheet"
    if low:
        remedy = "check NVLink, slow pairs and NCCL variables above; NCCL_DEBUG=INFO shows the path"
        return [warned(check, said, remedy)]
    return [passed(check, said)]


def across_hosts(rows: Sequence[HostRow], devices: Sequence[int]) -> Finding:
    """Say the bandwidth across hosts, which is compared with nothing: networks differ.

    Args:     rows: empty if the hosts differ in their devices. devices: number of each host's.
    """
    check = "across hosts"
    if len(devices) == 1:
        return skipped(check, "one host")
    if not rows:
        return skipped(check, "the hosts have different numbers of devices")
    largest = {one.over: one.row for one in rows if one.row.kind == "all-reduce"}  # the last one
    across, within = largest[ACROSS], largest.get(WITHIN)
    said = f"all-reduce {across.bus / 1e9:.3g} GB/s for each device"
    if within is not None:
        said += f", {within.bus / 1e9:.3g} within a host"
    return passed(check, f"{said}; not judged")


def slow_pairs(links: Sequence[Link], names: Sequence[str], judged: bool) -> Finding:
    """Check for pairs that are clearly slower than the median.

    Args:     names: of the devices. judged: whether the devices are real.
    """
    check = "links"
    if not links:
        return skipped(check, "one device")
    middle = links_of.median(links)
    if not judged:
        return skipped(check, "simulated devices share one memory")
    slow = links_of.behind(links)
    if slow:
        told = [f"{names[k.pair[0]]} - {names[k.pair[1]]} {k.slowest / 1e9:.0f} GB/s" for k in slow]
        said = f"{'; '.join(told)}, median {middle / 1e9:.0f} GB/s"
        remedy = "check this pair with `nvidia-smi nvlink -s`, `-e` and `nvidia-smi topo -m`"
        return failed(check, said, remedy)
    pairs = "1 pair" if len(links) == 1 else f"{len(links)} pairs"
    return passed(check, f"{pairs}, median {middle / 1e9:.0f} GB/s in one direction")


def matmul(rates: Rates, kind: str) -> list[Finding]:
    """Check matmuls and copies against the rates of a healthy GPU of this kind."""
    gpu, found = gpu_of_kind(kind), []
    for what, expected in expectations(gpu).items():
        rows = {key: each for key, each in rates.items() if key[0] == what}
        if not rows:
            continue
        best = max(rows, key=lambda key: statistics.median(rows[key]))
        share = statistics.median(rows[best]) / expected
        said = f"{best[1]}: {share:.0%} of what a healthy {kind} reaches"
        remedy = "check power limit, clocks, temperature, and other users of the GPUs"
        if share < FAR_TOO_LOW:
            found.append(failed(what, said, remedy))
        elif share < LOW:
            found.append(warned(what, said, remedy))
        else:
            found.append(passed(what, said))
    if not found:
        found = [skipped("matmul", f"no data sheet for {kind}")]
    return found


def expectations(gpu: Gpu | None) -> dict[str, float]:
    """Return the rates of a healthy GPU, by what is measured."""
    if gpu is None:
        return {}
    figures = {"matmul bfloat16": gpu.matmul, "matmul float8": gpu.float8, "copy": gpu.bandwidth}
    return {what: figure.value for what, figure in figures.items() if figure is not None}


def slow_gpus(rates: Rates, names: Sequence[str], judged: bool) -> Finding:
    """Check for a GPU slower than the others: it delays all of them."""
    check = "slow GPU"
    if len(names) == 1 or not judged:
        return skipped(check, "one device" if judged else "simulated devices share the cores")
    slow = []
    for (what, detail), each in rates.items():
        middle = statistics.median(each)
        for name, rate in zip(names, each, strict=True):
            if what.startswith(("matmul", "copy")) and rate < SLOW_GPU * middle:
                slow.append(f"{name}: {what} {detail} at {rate / middle:.0%} of the median")
    if slow:
        return warned(
            check, "; ".join(slow), "check its power, clocks and temperature, or replace it"
        )
    return passed(check, f"none: all within {1 - SLOW_GPU:.0%} of the median")


def transfers(rates: Rates) -> list[Finding]:
    """Check PCIe transfers, which offloading and checkpoints use."""
    pinned = {key: each for key, each in rates.items() if key[1].endswith("pinned")}
    if not pinned:
        return []
    low = [
        f"{what} {min(r) / 1e9:.1f} GB/s"
        for (what, _), r in pinned.items()
        if min(r) < MIN_TRANSFER_RATE
    ]
    if low:
        remedy = "check PCIe width and generation, and NUMA binding"
        return [warned("host transfers", ", ".join(low), remedy)]
    told = [f"{what} {statistics.median(r) / 1e9:.1f} GB/s" for (what, _), r in pinned.items()]
    return [passed("host transfers", ", ".join(told))]


def under_load(load: Sequence[GpuLoad]) -> list[Finding]:
    """Check clocks and temperature under load."""
    check = "clocks under load"
    if not load:
        return []
    bad = [(gpu.index, gpu.throttle_reasons) for gpu in load if gpu.throttle_reasons]
    if bad:
        said = "; ".join(f"GPU {i}: {', '.join(n for n, _ in why)}" for i, why in bad)
        hardware = any(hard for _, why in bad for _, hard in why)
        remedy = "check cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        return [(failed if hardware else warned)(check, said, remedy)]
    sm = [gpu.sm_clock for gpu in load if gpu.sm_clock is not None]
    heat = [gpu.temperature for gpu in load if gpu.temperature is not None]
    capped = sum(gpu.at_power_limit for gpu in load)
    said = f"{min(sm)} to {max(sm)} MHz" if sm else "unknown"
    said += f", at most {max(heat)} °C" if heat else ""
    return [passed(check, said + (f", {capped} at the power limit" if capped else ""))]
