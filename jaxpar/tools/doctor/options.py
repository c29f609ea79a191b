"""Options of `python -m jaxpar.doctor`."""

import dataclasses
import functools
import re
from typing import Annotated

from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.options import OnlyFields, Written
from jaxpar.config.rules.limits import REPEATS

#: The sections, in the order in which they run.
SECTIONS = {
    "versions": "installed packages and environment variables",
    "hardware": "GPUs, links and host, as reported by the driver and the kernel",
    "collectives": "is every collective's result correct?",
    "bandwidth": "how fast are collectives?",
    "links": "how fast is each pair of devices?",
    "compute": "how fast are matmuls and copies?",
}

#: Most seconds for a section: a timer of 300 years or more raises an exception.
MAX_SECONDS = 1e6

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check whether this machine is fit for training."""

    config: Annotated[ConfigArguments, OnlyFields(("cluster", "run.cpu_devices"))]
    only: Annotated[str, Written("A,B")] = ""
    """Sections to run. Empty: all."""
    mesh: Annotated[str, Written("AXIS=N,...")] = ""
    """Mesh whose axes are verified. Empty: the prime factors of the number of devices."""
    largest: Annotated[str, Written("SIZE")] = ""
    """Largest message, such as 64MiB. Empty: 1GiB on GPUs."""
    repeats: Annotated[int, REPEATS] = 5
    """Timed batches per program."""
    seconds: float = 300.0
    """Time limit of a section: then it counts as hung."""
    json: Annotated[str, Written("FILE")] = ""
    """Write all figures and findings to a file."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= MAX_SECONDS:
            rule = f"must be above 0, and at most {MAX_SECONDS:,.0f}"
            raise ConfigError("--seconds", self.seconds, rule, "use --seconds 300")
        _ = self.sections, self.largest_bytes, self.mesh and self.axes

    @functools.cached_property
    def sections(self) -> tuple[str, ...]:
        """The sections to run, in the order of SECTIONS."""
        return read_sections(self.only)

    @functools.cached_property
    def largest_bytes(self) -> int | None:
        """Bytes of the largest message; None: depends on the devices."""
        return read_size(self.largest) if self.largest else None

    @functools.cached_property
    def axes(self) -> dict[str, int]:
        """Sizes of axes; empty: `meshes.default_mesh`."""
        from jaxpar.tools.doctor.measure.verification import read_mesh  # which imports JAX

        return read_mesh(self.mesh)


def read_sections(text: str) -> tuple[str, ...]:
    """ "links,compute" -> ("links", "compute"), in the order of SECTIONS."""
    names = list(SECTIONS) if not text else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SECTIONS:
            rule, fix = f"must be one of {', '.join(SECTIONS)}", "use --only collectives,links"
            raise ConfigError("--only", name, rule, fix)
    return tuple(name for name in SECTIONS if name in names)


def read_size(text: str) -> int:
    """ "64MiB" -> bytes; at least a KiB."""
    found = re.fullmatch(r"([0-9]+)\s*(B|KiB|MiB|GiB|)", text)
    size = int(found[1]) * UNITS[found[2]] if found else 0
    if size < 1 << 10:
        rule = "must be a size in B, KiB, MiB or GiB, at least 1KiB"
        raise ConfigError("--largest", text, rule, "use --largest 64MiB")
    return size
