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
from jaxpar.config.rules.numbers import MAX_CPU_DEVICES
from jaxpar.runtime.options import Parser, check_repeats
from jaxpar.sharding.axes import AXES, DATA, EXPERT, PIPELINE, REPLICA, SEQUENCE, TENSOR

DOC = """Is this machine fit for training? python -m jaxpar.doctor [options]

Looks at versions, environment, GPUs, links and host; verifies the result of every collective on
every mesh axis; measures collectives, pairs of devices, matmuls and copies; and ends with a
checklist that says what to do. It changes nothing. docs/doctor.md explains each line.
"""

EPILOG = """\
Several processes are joined as by jaxpar.train, from the same variables, or by
--cluster.coordinator HOST:PORT --cluster.num-processes N --cluster.process-id I.
Exit codes: 0 nothing failed (warnings may stand), 1 a check failed, 2 wrong options, 124 a section
did not end in time.
"""

#: What is looked at, in this order.
SECTIONS = {
    "versions": "what is installed, and what is set",
    "hardware": "GPUs, links and host, as the driver and the kernel describe them",
    "collectives": "is every collective's result right?",
    "bandwidth": "how fast are collectives?",
    "links": "how fast is each pair of devices?",
    "compute": "how fast are matmuls and copies?",
}

#: Mesh axes in the order in which devices are shared out to them, where no mesh is given.
SHARED_OUT = (TENSOR, SEQUENCE, DATA, PIPELINE, REPLICA, EXPERT)

#: That a section may be given: a timer set to 300 years or more ends in an exception.
MAX_SECONDS = 1e6

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is asked for.

    largest   bytes of the largest message; None: as the devices are.
    mesh      sizes of axes; empty: as `default_mesh` says.
    cfg       the section `cluster`, and the simulated devices.
    """

    only: tuple[str, ...]
    largest: int | None
    mesh: dict[str, int]
    repeats: int
    seconds: float
    json: Path | None
    cfg: Config


def parser() -> Parser:
    """The options of the program itself."""
    made = Parser(
        "python -m jaxpar.doctor",
        DOC + "\nsections:\n" + "\n".join(f"  {n:12} {t}" for n, t in SECTIONS.items()),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--only", metavar="A,B", help=f"sections, of {', '.join(SECTIONS)} (all)")
    add("--cpu-devices", type=int, default=0, metavar="N", help="simulate so many CPU devices")
    add("--mesh", metavar="data=2,tensor=4", help="mesh whose axes are verified (small factors)")
    add("--largest", metavar="SIZE", help="largest message, as 64MiB (1GiB on GPUs)")
    add("--repeats", type=int, default=5, help="batches timed of each program (5)")
    add("--seconds", type=float, default=300, help="after which a section counts as hung (300)")
    add("--json", metavar="FILE", help="write all figures and findings to FILE")
    return made


def read_command(argv: Sequence[str]) -> DoctorOptions:
    """The command line, checked.

    Raises:   ConfigError for whatever is wrong with it.
    """
    if asks_help(argv):
        parser().parse_args(["--help"])
    asked, rest = parser().parse_known_args(list(argv))
    check_repeats(asked)
    for option, value in (("--seconds", asked.seconds), ("--cpu-devices", asked.cpu_devices + 1)):
        if not value > 0:
            rule, fix = "must be above 0", f"use {option} 8"
            raise ConfigError(option, getattr(asked, option[2:].replace("-", "_")), rule, fix)
    if asked.seconds > MAX_SECONDS:
        rule, fix = f"must be at most {MAX_SECONDS:,.0f}", "use --seconds 300"
        raise ConfigError("--seconds", asked.seconds, rule, fix)
    if asked.cpu_devices > MAX_CPU_DEVICES:
        rule = f"must be at most {MAX_CPU_DEVICES}"
        raise ConfigError("--cpu-devices", asked.cpu_devices, rule, "use --cpu-devices 8")
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
            rule, fix = f"is none of {', '.join(SECTIONS)}", "use --only collectives,links"
            raise ConfigError("--only", name, rule, fix)
    return tuple(name for name in SECTIONS if name in names)


def read_size(text: str) -> int:
    """ "64MiB" -> bytes; at least a KiB."""
    found = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB|)", text)
    size = int(found[1]) * UNITS[found[2]] if found else 0
    if size < 1 << 10:
        rule = "must be a number with B, KiB, MiB or GiB, of 1KiB or more"
        raise ConfigError("--largest", text, rule, "use --largest 64MiB")
    return size


def read_mesh(text: str | None) -> dict[str, int]:
    """ "data=2,tensor=4" -> {"data": 2, "tensor": 4}."""
    found: dict[str, int] = {}
    for pair in text.split(",") if text else []:
        axis, _, size = (part.strip() for part in pair.partition("="))
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            rule = f"must be AXIS=SIZE, of {', '.join(AXES)} and a whole number above 0"
            raise ConfigError("--mesh", pair, rule, "use --mesh data=2,tensor=4")
        if axis in found:
            raise ConfigError("--mesh", text, f"names {axis} twice", "give each axis once")
        found[axis] = int(size)
    return found


def check_file(path: Path) -> None:
    """Raises:   ConfigError for a --json that could not be written in the end."""
    folder = path.absolute().parent
    if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        what = "cannot be written to" if folder.is_dir() else "is not there"
        rule = "is a folder" if path.is_dir() else f"its folder {path.parent} {what}"
        raise ConfigError("--json", str(path), rule, "use --json doctor.json")


def read_cluster(args: Sequence[str], cpu_devices: int) -> Config:
    """The fields of `cluster` among the rest of a command line; whatever else is there is refused.

    Raises:   ConfigError.
    """
    for arg in args:
        name = arg.partition("=")[0]
        if arg.startswith("--") and not name.startswith("--cluster."):
            known = re.findall(r"--[\w-]+", parser().format_usage())
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"use {near[0]}" if near else "see --help"
            raise ConfigError("command line", name, "is no option of this program", fix)
    asked = parse_overrides(Config(), args, "python -m jaxpar.doctor")
    return replace(asked, **{"run.cpu_devices": cpu_devices})


def default_mesh(devices: int) -> dict[str, int]:
    """The devices' prime factors, shared out to the axes: 8 -> tensor=2, sequence=2, data=2."""
    sizes = dict.fromkeys(AXES, 1)
    for i, factor in enumerate(prime_factors(devices)):
        sizes[SHARED_OUT[i % len(SHARED_OUT)]] *= factor
    return sizes


def prime_factors(n: int) -> list[int]:
    """In ascending order."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def mesh_for(asked: dict[str, int], devices: int) -> ParallelConfig:
    """The mesh to verify.

    Raises:   ConfigError when its axes do not multiply to the number of devices.
    """
    sizes: dict[str, Any] = dict.fromkeys(AXES, 1) | asked if asked else default_mesh(devices)
    if math.prod(sizes.values()) != devices:
        said = ",".join(f"{axis}={size}" for axis, size in asked.items())
        rule = f"takes {math.prod(sizes.values())} devices, and there are {devices}"
        default = {a: s for a, s in default_mesh(devices).items() if s > 1} or {DATA: 1}
        fix = f"use --mesh {','.join(f'{a}={s}' for a, s in default.items())}"
        raise ConfigError("--mesh", said, rule, fix)
    return dataclasses.replace(ParallelConfig(), **sizes)
