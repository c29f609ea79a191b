"""Query GPUs with `nvidia-smi`, by its field names.

Every query is one read-only process. A field that the driver does not know fails the complete
query, so it is removed or replaced by its older name, and the query is repeated.
"""

import csv
import re
import subprocess
from collections.abc import Callable, Sequence

type Run = Callable[[Sequence[str]], str]
type GpuFacts = dict[str, str]

FIELDS = tuple(
    "index uuid name pci.bus_id driver_version memory.total memory.used power.draw power.limit "
    "power.default_limit clocks.current.sm clocks.max.sm clocks.current.memory clocks.max.memory "
    "clocks_event_reasons.active temperature.gpu persistence_mode mig.mode.current "
    "compute_mode ecc.mode.current ecc.errors.corrected.volatile.total "
    "ecc.errors.uncorrected.volatile.total ecc.errors.uncorrected.aggregate.total "
    "pcie.link.gen.max pcie.link.width.current pcie.link.width.max fabric.state "
    "fabric.status".split()
)

#: Fields that change under load.
LOAD_FIELDS = tuple(
    "uuid power.draw clocks.current.sm clocks_event_reasons.active temperature.gpu".split()
)

REMAPPED = ("gpu_uuid", *(f"remapped_rows.{x}" for x in "uncorrectable pending failure".split()))

#: Field names before driver 535.
OLDER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}

#: Bits of clocks_event_reasons.active other than idling and the power limit: name, and whether it
#: is a hardware slowdown. Source: NVML, nvmlClocksEventReasons.
REASONS = {
    0x08: ("hardware slowdown", True),
    0x20: ("software thermal slowdown", False),
    0x40: ("hardware thermal slowdown", True),
    0x80: ("power brake by the host", True),
}
POWER_CAP = 0x04

#: Timeout of a query in seconds. Without persistence mode, a query initializes every GPU.
PATIENCE = 60


NOT_INSTALLED = "nvidia-smi is not installed"


class Unavailable(Exception):
    """nvidia-smi is not installed, or cannot communicate with the driver."""


def run(arguments: Sequence[str]) -> str:
    """Return the output of `nvidia-smi`. Raises:   Unavailable, with its error message."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=PATIENCE
        )
    except FileNotFoundError as error:
        raise Unavailable(NOT_INSTALLED) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from error
    if done.returncode:
        raise Unavailable(" ".join((done.stdout + done.stderr).split()))
    return done.stdout


def query(fields: Sequence[str], what: str = "gpu", ask: Run = run) -> list[GpuFacts]:
    """Return the fields of each GPU that the driver knows, as text without units.

    Args:     what: "gpu" or "remapped-rows".
    Raises:   Unavailable.
    """
    names = {field: field for field in fields}
    while names:
        try:
            text = ask([f"--query-{what}={','.join(names.values())}", "--format=csv,nounits"])
            return [dict(zip(names, row, strict=False)) for row in _rows(text)]
        except Unavailable as error:
            unknown = re.search(r'Field "([^"]+)" is not a valid field', str(error))
            known = {asked: field for field, asked in names.items()}
            if not unknown or unknown[1] not in known:
                raise
            field = known[unknown[1]]
            if unknown[1] == field and field in OLDER:
                names[field] = OLDER[field]
            else:
                del names[field]
    return []


def _rows(text: str) -> list[list[str]]:
    """Return the rows of a CSV table after its header."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [[cell.strip() for cell in row] for row in csv.reader(lines[1:])]


def gpus(ask: Run = run) -> list[GpuFacts]:
    """Return the values of every GPU of this host, with remapped rows. Raises:   Unavailable."""
    found = query(FIELDS, ask=ask)
    try:
        remapped = {row["gpu_uuid"]: row for row in query(REMAPPED, "remapped-rows", ask)}
    except Unavailable:  # GPUs before Ampere have none
        remapped = {}
    return [gpu | remapped.get(gpu.get("uuid", ""), {}) for gpu in found]


def cuda_of_driver(ask: Run = run) -> str:
    """Return the newest CUDA version that the driver supports, as "13.0"; empty if unknown."""
    found = re.search(r"CUDA Version:\s*([\d.]+)", ask([]))
    return found[1] if found else ""


def number(gpu: GpuFacts, field: str) -> float | None:
    """Return a field's value, or None if the GPU does not have it ("[N/A]")."""
    try:
        return float(gpu.get(field, ""))
    except ValueError:
        return None


def throttle_reasons(gpu: GpuFacts) -> list[tuple[str, bool]]:
    """Return the reasons for reduced clocks: names, and whether the hardware slows down."""
    return [why for bit, why in REASONS.items() if bit & _active(gpu)]


def at_power_limit(gpu: GpuFacts) -> bool:
    """Return whether the power limit reduces the clocks, as in every large matmul."""
    return bool(POWER_CAP & _active(gpu))


def _active(gpu: GpuFacts) -> int:
    try:
        return int(gpu.get("clocks_event_reasons.active", ""), 16)
    except ValueError:
        return 0
