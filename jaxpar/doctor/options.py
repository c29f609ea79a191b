"""The command line of `python -m jaxpar.doctor`."""

import argparse
import dataclasses
import difflib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.config import Config, ConfigError, ParallelConfig, replace
from jaxpar.config.command_line import asks_help, parse_overrides
from jaxpar.config.numerals import only_digits
from jaxpar.config.rules.limits import MAX_CPU_DEVICES, REPEATS, Range
from jaxpar.runtime.options import Parser
from jaxpar.sharding.axes import AXES, DATA, EXPERT, PIPELINE, REPLICA, SEQUENCE, TENSOR

DOC = """Check whether this machine is fit for training: python -m jaxpar.doctor [options]

Reads versions, environment, GPUs, links and host. Verifies the result of every collective on every
mesh axis. Measures collectives, pairs of devices, matmuls and copies. Ends with a checklist of
findings and remedies. It changes nothing on the machine. docs/doctor.md explains each line.
"""

EPILOG = """\
Several processes join as in jaxpar.train, from the same environment variables, or with
--cluster.coordinator HOST:PORT --cluster.num-processes N --cluster.process-id I.
Exit codes: 0 nothing failed (there may be warnings), 1 a check failed, 2 invalid options, 124 a
section did not end in time.
"""

#: The sections, in the order in which they run.
SECTIONS = {
    "versions": "installed packages and environment variables",
    "hardware": "GPUs, links and host, as reported by the driver and the kernel",
    "collectives": "is every collective's result correct?",
    "bandwidth": "how fast are collectives?",
    "latency": "how fast are collectives of small messages, by NCCL and by XLA's kernel?",
    "links": "how fast is each pair of devices?",
    "compute": "how fast are matmuls and copies?",
}

#: Mesh axes in the order in which devices are assigned to them, if no mesh is given.
SHARED_OUT = (TENSOR, SEQUENCE, DATA, PIPELINE, REPLICA, EXPERT)

#: Most seconds for a section: a timer of 300 years or more raises an exception.
MAX_SECONDS = 1e6

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The parsed command line.

    largest   bytes of the largest message; None: depends on the devices.
    mesh      sizes of axes; empty: `default_mesh`.
    cfg       the section `cluster` and the number of simulated devices.
    """

    only: tuple[str, ...]
    largest: int | None
    mesh: dict[str, int]
    repeats: int
    seconds: float
    json: Path | None
    cfg: Config


def parser() -> Parser:
    """Return the parser of the program's own options."""
    made = Parser(
        "python -m jaxpar.doctor",
        DOC + "\nsections:\n" + "\n".join(f"  {n:12} {t}" for n, t in SECTIONS.items()),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--only", metavar="A,B", help=f"sections to run: {', '.join(SECTIONS)} (all)")
    simulated = Range(0, MAX_CPU_DEVICES, 8)
    made.whole("--cpu-devices", 0, simulated, metavar="N", help="simulate N CPU devices")
    add("--mesh", metavar="data=2,tensor=4", help="mesh whose axes are verified (prime factors)")
    add("--largest", metavar="SIZE", help="largest message, such as 64MiB (1GiB on GPUs)")
    made.whole("--repeats", 5, REPEATS, help="timed batches per program (5)")
    add(
        "--seconds",
        type=float,
        default=300,
        help="time limit of a section: then it counts as hung (300)",
    )
    add("--json", metavar="FILE", help="write all figures and findings to FILE")
    return made


def read_command(argv: Sequence[str]) -> DoctorOptions:
    """Parse and check the command line.

    Raises:   ConfigError if an option is invalid.
    """
    if asks_help(argv):
        parser().parse_args(["--help"])
    asked, rest = parser().parse_known_args(list(argv))
    if not 0 < asked.seconds <= MAX_SECONDS:
        rule = f"must be above 0, and at most {MAX_SECONDS:,.0f}"
        raise ConfigError("--seconds", asked.seconds, rule, "use --seconds 300")
    return DoctorOptions(
        only=read_sections(asked.only),
        largest=None if asked.largest is None else read_size(asked.largest),
        mesh=read_mesh(asked.mesh),
        repeats=asked.repeats,
        seconds=asked.seconds,
        json=None if asked.json is None else Path(asked.json),
        cfg=read_cluster(rest, asked.cpu_devices),
    )


def read_sections(text: str | None) -> tuple[str, ...]:
    """ "links,compute" -> ("links", "compute"), in the order of SECTIONS."""
    names = list(SECTIONS) if text is None else [name.strip() for name in text.split(",")]
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


def read_mesh(text: str | None) -> dict[str, int]:
    """ "data=2,tensor=4" -> {"data": 2, "tensor": 4}."""
    found: dict[str, int] = {}
    for pair in text.split(",") if text else []:
        axis, _, size = (part.strip() for part in pair.partition("="))
        if axis not in AXES or not only_digits(size) or int(size) < 1:
            rule = f"must be AXIS=SIZE, where AXIS is one of {', '.join(AXES)} and SIZE is above 0"
            raise ConfigError("--mesh", pair, rule, "use --mesh data=2,tensor=4")
        if axis in found:
            raise ConfigError("--mesh", text, f"names {axis} twice", "give each axis once")
        found[axis] = int(size)
    return found


def check_file(path: Path) -> None:
    """Check that --json can be written.

    Raises:   ConfigError if it cannot.
    """
    folder = path.parent
    if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        what = "is not writable" if folder.is_dir() else "does not exist"
        rule = "is a folder" if path.is_dir() else f"its folder {path.parent} {what}"
        raise ConfigError("--json", str(path), rule, "use --json doctor.json")


def read_cluster(args: Sequence[str], cpu_devices: int) -> Config:
    """Parse the fields of `cluster` from the remaining arguments.

    Raises:   ConfigError for any other argument.
    """
    for arg in args:
        name = arg.partition("=")[0]
        if arg.startswith("--") and not name.startswith("--cluster."):
            known = re.findall(r"--[\w-]+", parser().format_usage())
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"use {near[0]}" if near else "see --help"
            raise ConfigError("command line", name, "is not an option of this program", fix)
    asked = parse_overrides(Config(), args, "python -m jaxpar.doctor")
    return replace(asked, **{"run.cpu_devices": cpu_devices})


def default_mesh(devices: int) -> dict[str, int]:
    """Assign the prime factors of `devices` to the axes: 8 -> tensor=2, sequence=2, data=2."""
    sizes = dict.fromkeys(AXES, 1)
    for i, factor in enumerate(prime_factors(devices)):
        sizes[SHARED_OUT[i % len(SHARED_OUT)]] *= factor
    return sizes


def prime_factors(n: int) -> list[int]:
    """Return the prime factors in ascending order."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def mesh_for(asked: dict[str, int], devices: int) -> ParallelConfig:
    """Return the mesh to verify.

    Raises:   ConfigError when its axes do not multiply to the number of devices.
    """
    sizes: dict[str, Any] = dict.fromkeys(AXES, 1) | asked if asked else default_mesh(devices)
    if math.prod(sizes.values()) != devices:
        said = ",".join(f"{axis}={size}" for axis, size in asked.items())
        rule = f"takes {math.prod(sizes.values())} devices, but there are {devices}"
        default = {a: s for a, s in default_mesh(devices).items() if s > 1} or {DATA: 1}
        fix = f"use --mesh {','.join(f'{a}={s}' for a, s in default.items())}"
        raise ConfigError("--mesh", said, rule, fix)
    return dataclasses.replace(ParallelConfig(), **sizes)
