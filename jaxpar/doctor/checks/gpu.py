"""Checks of a host's GPUs. Each check is a function from facts to one finding."""

import re
from collections.abc import Callable, Iterable, Sequence

from jaxpar.doctor.checks.findings import Finding, failed, passed, skipped, warned
from jaxpar.doctor.facts import HostFacts
from jaxpar.planning.predict.hardware import gpu_of_kind
from jaxpar.runtime.gpus.nvidia_smi import NOT_INSTALLED, GpuFacts, number, throttle_reasons

#: MiB in use on a GPU before this program uses any. More than this means another program runs.
IN_USE_MIB = 1024

#: Tolerance in watts when comparing a power limit with the default: the driver rounds.
POWER_SLACK = 1.0

RESET = "drain the host and reset the GPU (nvidia-smi --gpu-reset -i N), or reboot"


def _where(gpus: Iterable[GpuFacts], tell: Callable[[GpuFacts], str | None]) -> list[str]:
    """Group GPUs by their message: "GPU 3: 500 W". GPUs without a message are left out."""
    told: dict[str, list[str]] = {}
    for gpu in gpus:
        if text := tell(gpu):
            told.setdefault(text, []).append(gpu.get("index", "?"))
    return [f"GPU {','.join(indices)}: {text}" for text, indices in told.items()]


def power_limit(facts: HostFacts) -> Finding:
    """Check the power limit. Below the default, every matmul is slower."""
    check = "power limit"

    def tell(gpu: GpuFacts) -> str | None:
        limit, usual = number(gpu, "power.limit"), number(gpu, "power.default_limit")
        lower = limit is not None and usual is not None and limit < usual - POWER_SLACK
        return f"{limit:.0f} W of {usual:.0f} W" if lower else None

    if bad := _where(facts.gpus, tell):
        remedy = (
            "ask an administrator to raise it: nvidia-smi -pl WATTS (rates measured here are lower)"
        )
        return warned(check, "; ".join(bad), remedy)
    limits = {f"{limit:.0f} W" for g in facts.gpus if (limit := number(g, "power.limit"))}
    return passed(check, f"the default, {' and '.join(sorted(limits))}" if limits else "unknown")


def clocks(facts: HostFacts) -> Finding:
    """Check for throttling while idle: by heat, the power supply or a fault."""
    check = "clocks at rest"
    bad = _where(facts.gpus, lambda g: ", ".join(name for name, _ in throttle_reasons(g)))
    told = "; ".join(bad)
    remedy = "check cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
    if any(hardware for gpu in facts.gpus for _, hardware in throttle_reasons(gpu)):
        return failed(check, told, remedy)
    if bad:
        return warned(check, told, remedy)
    heat = [t for g in facts.gpus if (t := number(g, "temperature.gpu")) is not None]
    return passed(check, f"not throttled, at most {max(heat):.0f} °C" if heat else "not throttled")


def ecc(facts: HostFacts) -> Finding:
    """Check for memory errors, and that error correction is on."""
    check, fields = "ECC", "ecc.errors.{}.total"
    volatile = lambda g: number(g, fields.format("uncorrected.volatile"))  # noqa: E731
    now = _where(facts.gpus, lambda g: f"{n:.0f} uncorrected" if (n := volatile(g)) else None)
    if now:
        return failed(check, "; ".join(now) + " since the driver was loaded", RESET)
    off = _where(facts.gpus, lambda g: "off" if g.get("ecc.mode.current") == "Disabled" else None)
    if off:
        return warned(check, "; ".join(off), "turn it on: nvidia-smi -e 1, then reset the GPU")
    ever = lambda g: number(g, fields.format("uncorrected.aggregate"))  # noqa: E731
    once = _where(facts.gpus, lambda g: f"{n:.0f} uncorrected in total" if (n := ever(g)) else None)
    corrected = lambda g: number(g, fields.format("corrected.volatile"))  # noqa: E731
    once += _where(facts.gpus, lambda g: f"{n:.0f} corrected" if (n := corrected(g)) else None)
    if once:
        return warned(check, "; ".join(once), "monitor the errors; replace a GPU if they recur")
    return passed(check, "no errors")


def remapped_rows(facts: HostFacts) -> Finding:
    """Check for memory rows that were remapped, or could not be."""
    check, at = "remapped rows", "remapped_rows"
    bad = _where(facts.gpus, lambda g: "failed" if g.get(f"{at}.failure") == "Yes" else None)
    if bad:
        return failed(check, "; ".join(bad), "replace the GPU: it has no spare rows left")
    waiting = _where(facts.gpus, lambda g: "pending" if g.get(f"{at}.pending") == "Yes" else None)
    if waiting:
        return failed(check, "; ".join(waiting), RESET + "; this remaps the row")
    had = lambda g: number(g, f"{at}.uncorrectable")  # noqa: E731
    done = _where(facts.gpus, lambda g: f"{n:.0f} after errors" if (n := had(g)) else None)
    if done:
        return warned(check, "; ".join(done), "the GPU works; monitor it for more")
    if not any(f"{at}.failure" in g for g in facts.gpus):
        return skipped(check, "these GPUs do not report them")
    return passed(check, "none after uncorrectable errors")


def persistence(facts: HostFacts) -> Finding:
    """Check persistence mode. Without it the driver unloads between programs and loses settings."""
    off = [g["index"] for g in facts.gpus if g.get("persistence_mode") == "Disabled"]
    if off:
        remedy = "ask an administrator to run nvidia-persistenced, or nvidia-smi -pm 1"
        return warned("persistence mode", f"off on GPU {', '.join(off)}", remedy)
    return passed("persistence mode", "on")


def mig(facts: HostFacts) -> Finding:
    """Check MIG. A slice of a GPU has part of its memory and no NVLink."""
    on = [g["index"] for g in facts.gpus if g.get("mig.mode.current") == "Enabled"]
    if on:
        remedy = "train on complete GPUs: slices have no NVLink and no peer access"
        return warned("MIG", f"enabled on GPU {', '.join(on)}", remedy)
    return passed("MIG", "off")


def in_use(facts: HostFacts) -> Finding:
    """Check that no other program uses the GPUs' memory."""
    used = lambda g: number(g, "memory.used")  # noqa: E731
    busy = _where(
        facts.gpus, lambda g: f"{n:,.0f} MiB in use" if (n := used(g) or 0) > IN_USE_MIB else None
    )
    if busy:
        remedy = "find the process with nvidia-smi: JAX needs 0.92 of a GPU's memory"
        return warned("GPUs free", "; ".join(busy), remedy)
    return passed("GPUs free", "no other program uses them")


def pcie(facts: HostFacts) -> Finding:
    """Check the PCIe width. Fewer lanes than the GPU has mean a bad slot or riser."""

    def tell(gpu: GpuFacts) -> str | None:
        now, full = number(gpu, "pcie.link.width.current"), number(gpu, "pcie.link.width.max")
        return f"x{now:.0f} of x{full:.0f}" if now and full and now < full else None

    if bad := _where(facts.gpus, tell):
        return warned("PCIe", "; ".join(bad), "reseat the GPU or its riser; check the BIOS")
    widths = {
        f"gen {g['pcie.link.gen.max']} x{w:.0f}"
        for g in facts.gpus
        if (w := number(g, "pcie.link.width.current")) and "pcie.link.gen.max" in g
    }
    return passed("PCIe", " and ".join(sorted(widths)) or "unknown")


def nvlink(facts: HostFacts) -> Finding:
    """Check for pairs without NVLink, and for links that are down."""
    check = "NVLink"
    if len(facts.gpus) < 2:
        return skipped(check, "one GPU")
    table = gpu_of_kind(facts.gpus[0].get("name", ""))

    def tell(gpu: GpuFacts) -> str | None:
        links = facts.nvlinks.get(gpu.get("index", ""), [])
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
                f"{facts.gpus[0]['name']} has NVLink: check `nvidia-smi topo -m` and Fabric Manager"
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
    known = [g for g in facts.gpus if g.get("fabric.state", "")[:1].isalpha()]
    known = [g for g in known if g["fabric.state"] not in ("Not Supported", "N/A")]
    if not known:
        return skipped(check, "these GPUs have none, or do not report it")

    def tell(gpu: GpuFacts) -> str | None:
        state, status = gpu["fabric.state"], gpu.get("fabric.status", "Success")
        return None if (state, status) == ("Completed", "Success") else f"{state}, {status}"

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
        remedy = "install the driver's version of nvidia-smi, or mount it into the container"
        return [warned("GPUs", f"nvidia-smi reports nothing: {facts.driver_error}", remedy)]
    if facts.driver_error and facts.driver_error != NOT_INSTALLED:
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
