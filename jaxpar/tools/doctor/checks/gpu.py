"""Checks of a host's GPUs. Each check is a function from facts to one finding."""

import re
from collections.abc import Callable, Iterable, Sequence

from jaxpar.prediction.hardware import gpu_of_kind
from jaxpar.runtime.gpus.nvml import NO_LIBRARY, GpuFacts
from jaxpar.tools.doctor.checks.findings import Finding, failed, passed, skipped, warned
from jaxpar.tools.doctor.facts import HostFacts

#: Bytes in use on a GPU before this program uses any. More than this means another program runs.
IN_USE = 1 << 30

#: Tolerance in watts when comparing a power limit with the default: the driver rounds.
POWER_SLACK = 1.0

RESET = "drain the host and reset the GPU (nvidia-smi --gpu-reset -i N), or reboot"


def _where(gpus: Iterable[GpuFacts], tell: Callable[[GpuFacts], str | None]) -> list[str]:
    """Group GPUs by their message: "GPU 3: 500 W". GPUs without a message are left out."""
    told: dict[str, list[str]] = {}
    for gpu in gpus:
        if text := tell(gpu):
            told.setdefault(text, []).append(str(gpu.index))
    return [f"GPU {','.join(indices)}: {text}" for text, indices in told.items()]


def power_limit(facts: HostFacts) -> Finding:
    """Check the power limit. Below the default, every matmul is slower."""
    check = "power limit"

    def tell(gpu: GpuFacts) -> str | None:
        limit, usual = gpu.power_limit, gpu.default_power_limit
        lower = limit is not None and usual is not None and limit < usual - POWER_SLACK
        return f"{limit:.0f} W of {usual:.0f} W" if lower else None

    if bad := _where(facts.gpus, tell):
        remedy = (
            "ask an administrator to raise it: nvidia-smi -pl WATTS (rates measured here are lower)"
        )
        return warned(check, "; ".join(bad), remedy)
    limits = {f"{gpu.power_limit:.0f} W" for gpu in facts.gpus if gpu.power_limit}
    return passed(check, f"the default, {' and '.join(sorted(limits))}" if limits else "unknown")


def clocks(facts: HostFacts) -> Finding:
    """Check for throttling while idle: by heat, the power supply or a fault."""
    check = "clocks at rest"
    bad = _where(facts.gpus, lambda gpu: ", ".join(name for name, _ in gpu.throttle_reasons))
    told = "; ".join(bad)
    remedy = "check cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
    if any(hardware for gpu in facts.gpus for _, hardware in gpu.throttle_reasons):
        return failed(check, told, remedy)
    if bad:
        return warned(check, told, remedy)
    heat = [gpu.temperature for gpu in facts.gpus if gpu.temperature is not None]
    return passed(check, f"not throttled, at most {max(heat)} °C" if heat else "not throttled")


def ecc(facts: HostFacts) -> Finding:
    """Check for memory errors, and that error correction is on."""
    check = "ECC"
    count = lambda n, what: f"{n} {what}" if n else None  # noqa: E731
    now = _where(facts.gpus, lambda gpu: count(gpu.uncorrected_errors, "uncorrected"))
    if now:
        return failed(check, "; ".join(now) + " since the driver was loaded", RESET)
    if off := _where(facts.gpus, lambda gpu: "off" if gpu.ecc is False else None):
        return warned(check, "; ".join(off), "turn it on: nvidia-smi -e 1, then reset the GPU")
    once = _where(facts.gpus, lambda g: count(g.all_uncorrected_errors, "uncorrected in total"))
    once += _where(facts.gpus, lambda gpu: count(gpu.corrected_errors, "corrected"))
    if once:
        return warned(check, "; ".join(once), "monitor the errors; replace a GPU if they recur")
    return passed(check, "no errors")


def remapped_rows(facts: HostFacts) -> Finding:
    """Check for memory rows that were remapped, or could not be."""
    check = "remapped rows"
    if bad := _where(facts.gpus, lambda gpu: "failed" if gpu.remapping_failed else None):
        return failed(check, "; ".join(bad), "replace the GPU: it has no spare rows left")
    if waiting := _where(facts.gpus, lambda gpu: "pending" if gpu.remapping_pending else None):
        return failed(check, "; ".join(waiting), RESET + "; this remaps the row")
    after = lambda gpu: f"{gpu.remapped_rows} after errors" if gpu.remapped_rows else None  # noqa: E731
    if done := _where(facts.gpus, after):
        return warned(check, "; ".join(done), "the GPU works; monitor it for more")
    if all(gpu.remapping_failed is None for gpu in facts.gpus):
        return skipped(check, "these GPUs do not report them")
    return passed(check, "none after uncorrectable errors")


def persistence(facts: HostFacts) -> Finding:
    """Check persistence mode. Without it the driver unloads between programs and loses settings."""
    off = [str(gpu.index) for gpu in facts.gpus if gpu.persistence_mode is False]
    if off:
        remedy = "ask an administrator to run nvidia-persistenced, or nvidia-smi -pm 1"
        return warned("persistence mode", f"off on GPU {', '.join(off)}", remedy)
    return passed("persistence mode", "on")


def mig(facts: HostFacts) -> Finding:
    """Check MIG. A slice of a GPU has part of its memory and no NVLink."""
    on = [str(gpu.index) for gpu in facts.gpus if gpu.mig]
    if on:
        remedy = "train on complete GPUs: slices have no NVLink and no peer access"
        return warned("MIG", f"enabled on GPU {', '.join(on)}", remedy)
    return passed("MIG", "off")


def in_use(facts: HostFacts) -> Finding:
    """Check that no other program uses the GPUs' memory."""

    def tell(gpu: GpuFacts) -> str | None:
        used = gpu.memory_used or 0
        return f"{used / 2**20:,.0f} MiB in use" if used > IN_USE else None

    if busy := _where(facts.gpus, tell):
        remedy = "find the process with nvidia-smi: JAX needs 0.92 of a GPU's memory"
        return warned("GPUs free", "; ".join(busy), remedy)
    return passed("GPUs free", "no other program uses them")


def pcie(facts: HostFacts) -> Finding:
    """Check the PCIe width. Fewer lanes than the GPU has mean a bad slot or riser."""

    def tell(gpu: GpuFacts) -> str | None:
        now, full = gpu.pcie_width, gpu.max_pcie_width
        return f"x{now} of x{full}" if now and full and now < full else None

    if bad := _where(facts.gpus, tell):
        return warned("PCIe", "; ".join(bad), "reseat the GPU or its riser; check the BIOS")
    widths = {
        f"gen {gpu.pcie_generation} x{gpu.pcie_width}"
        for gpu in facts.gpus
        if gpu.pcie_width and gpu.pcie_generation
    }
    return passed("PCIe", " and ".join(sorted(widths)) or "unknown")


def nvlink(facts: HostFacts) -> Finding:
    """Check for pairs without NVLink, and for links that are down."""
    check = "NVLink"
    if len(facts.gpus) < 2:
        return skipped(check, "one GPU")
    table = gpu_of_kind(facts.gpus[0].name)

    def tell(gpu: GpuFacts) -> str | None:
        links = gpu.nvlinks
        down = [str(i) for i, speed in enumerate(links) if speed is None]
        if down:
            return f"{len(down)} of {len(links)} links down ({','.join(down)})"
        few = table is not None and links and len(links) < table.links
        return f"{len(links)} of {table.links} links" if table is not None and few else None

    if down := _where(facts.gpus, tell):
        remedy = "look for Xid 74 in dmesg, and run `nvidia-smi nvlink -e`; " + RESET
        return failed(check, "; ".join(down), remedy)
    slow = [
        f"{a}-{b} {way}"
        for a, row in facts.links.items()
        for b, way in row.items()
        if a < b and not re.match(r"NV\d", way)
    ]
    if slow:
        many = ", ..." if len(slow) > 4 else ""
        said = f"{len(slow)} pairs use PCIe: {', '.join(slow[:4])}{many}"
        remedy = "use small tensor groups and ZeRO-1: these pairs run at PCIe speed"
        if table is not None:
            remedy = (
                f"{facts.gpus[0].name} has NVLink: check `nvidia-smi topo -m` and Fabric Manager"
            )
            return failed(check, said, remedy)
        return warned(check, said, remedy)
    if not facts.links:
        return skipped(check, "the driver reports no topology")
    ways = sorted({way for row in facts.links.values() for way in row.values()})
    return passed(check, f"all pairs, {' and '.join(ways)}")


def fabric(facts: HostFacts) -> Finding:
    """Check Fabric Manager. GPUs behind NVSwitch cannot run until it has registered them."""
    check = "NVSwitch fabric"
    known = [gpu for gpu in facts.gpus if gpu.fabric_state is not None]
    if not known:
        return skipped(check, "these GPUs have none, or do not report it")

    def tell(gpu: GpuFacts) -> str | None:
        told = [gpu.fabric_state or "", gpu.fabric_status or "N/A"]
        return None if told == ["Completed", "Success"] else ", ".join(told)

    if bad := _where(known, tell):
        remedy = "start nvidia-fabricmanager of the driver's version, and read its log"
        return failed(check, "; ".join(bad), remedy)
    return passed(check, "all GPUs registered")


#: Checks for hosts with GPUs, in the order of the checklist.
CHECKS: tuple[Callable[[HostFacts], Finding], ...] = (
    nvlink, fabric, power_limit, clocks, ecc, remapped_rows, pcie, persistence, mig, in_use,
)  # fmt: skip


def check(facts: HostFacts) -> list[Finding]:
    """Return the findings about a host's GPUs."""
    if facts.gpus:
        return [one(facts) for one in CHECKS]
    if facts.backend == "gpu":
        remedy = "mount the driver's libnvidia-ml.so.1 into the container, of the driver's version"
        remedy += ": NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return [warned("GPUs", f"NVML reports nothing: {facts.driver_error}", remedy)]
    if facts.driver_error and facts.driver_error != NO_LIBRARY:
        return [
            failed(
                "GPUs",
                facts.driver_error,
                "load the driver (check dmesg and nvidia-smi), or reboot",
            )
        ]
    return [skipped("GPUs", facts.driver_error or "none in this host")]


def used(processes: Sequence[HostFacts]) -> Finding:
    """Check that every GPU is used.

    Args:     processes: all processes of one host.
    """
    check, gpus = "GPUs used", len(processes[0].gpus)
    taken = sum(len(facts.devices) for facts in processes if facts.backend == "gpu")
    if not gpus or not taken:
        return skipped(check, "none")
    said = f"{taken} of {gpus}"
    if any("CUDA_VISIBLE_DEVICES" in facts.environment for facts in processes):
        return passed(check, f"{said}, by CUDA_VISIBLE_DEVICES")
    if taken < gpus:
        return warned(
            check, said, "start one process per GPU, or read JAX's messages about the others"
        )
    return passed(check, said)
