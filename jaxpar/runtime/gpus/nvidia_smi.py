"""What the driver says of its GPUs, by `nvidia-smi`, under the names that it has for each value.

Every query is one process that only reads. A field that a driver does not know would spoil the
whole query, so it is taken out, or asked for by its older name, and the query is made again.
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

#: What changes under load.
LOAD_FIELDS = tuple(
    "uuid power.draw clocks.current.sm clocks_event_reasons.active temperature.gpu".split()
)

REMAPPED = ("gpu_uuid", *(f"remapped_rows.{x}" for x in "uncorrectable pending failure".split()))

#: Names of fields before driver 535.
OLDER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}

#: Bits of clocks_event_reasons.active that mean more than idling or the power limit: name, and
#: whether the hardware itself slows down. Source: NVML, nvmlClocksEventReasons.
REASONS = {
    0x08: ("hardware slowdown", True),
    0x20: ("software thermal slowdown", False),
    0x40: ("hardware thermal slowdown", True),
    0x80: ("power brake by the host", True),
}
POWER_CAP = 0x04

#: Seconds that a query may take: with persistence mode off, it initializes every GPU.
PATIENCE = 60


NOT_INSTALLED = "nvidia-smi is not installed"


class Unavailable(Exception):
    """nvidia-smi is not there, or cannot speak with the driver."""


def run(arguments: Sequence[str]) -> str:
    """What `nvidia-smi` prints. Raises:   Unavailable, with its words."""
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
    """The fields of each GPU as text, without units; those that the driver knows.

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
    """The rows of a CSV below its header."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [[cell.strip() for cell in row] for row in csv.reader(lines[1:])]


def gpus(ask: Run = run) -> list[GpuFacts]:
    """Every GPU of this host, remapped rows among its values. Raises:   Unavailable."""
    found = query(FIELDS, ask=ask)
    try:
        remapped = {row["gpu_uuid"]: row for row in query(REMAPPED, "remapped-rows", ask)}
    except Unavailable:  # GPUs before Ampere have none
        remapped = {}
    return [gpu | remapped.get(gpu.get("uuid", ""), {}) for gpu in found]


def cuda_of_driver(ask: Run = run) -> str:
    """The newest CUDA that the driver serves, as "13.0"; empty if it does not say."""
    found = re.search(r"CUDA Version:\s*([\d.]+)", ask([]))
    return found[1] if found else ""


def number(gpu: GpuFacts, field: str) -> float | None:
    """A field's value; None where the GPU does not have it ("[N/A]")."""
    try:
        return float(gpu.get(field, ""))
    except ValueError:
        return None


def throttle_reasons(gpu: GpuFacts) -> list[tuple[str, bool]]:
    """Why a GPU's clocks are held down: names, and whether by the hardware."""
    return [why for bit, why in REASONS.items() if bit & _active(gpu)]


def at_power_limit(gpu: GpuFacts) -> bool:
    """Whether the power limit holds the clocks down, as it does in every large matmul."""
    return bool(POWER_CAP & _active(gpu))


def _active(gpu: GpuFacts) -> int:
    try:
        return int(gpu.get("clocks_event_reasons.active", ""), 16)
    except ValueError:
        return 0
