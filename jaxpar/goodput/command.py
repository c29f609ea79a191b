"""The command line of `python -m jaxpar.goodput`, and its output."""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.command_line import asks_help
from jaxpar.config.rules.limits import Range
from jaxpar.goodput import showing, study
from jaxpar.goodput.failures import DAY, HOUR, KINDS, Rates
from jaxpar.goodput.recovery import Policy, Saves
from jaxpar.runtime.options import Parser, check_file
from jaxpar.runtime.stages import stage

#: Options in seconds, hours or days: default and text of --help. All may be 0.
TIMES: dict[str, tuple[float, str]] = {
    "fixed-seconds": (0.0, "the part of a step that is not longer on fewer hosts"),
    "disk-blocking": (1.0, "seconds that training waits for a save to disk"),
    "disk-seconds": (60.0, "further seconds until it is complete"),
    "disk-load": (60.0, "seconds to load it"),
    "memory-blocking": (0.1, "seconds that training waits for a mirror"),
    "memory-seconds": (10.0, "further seconds until it is complete"),
    "memory-load": (10.0, "seconds to load it"),
    "detect": (60.0, "seconds from a failure until all processes have ended"),
    "restart": (120.0, "seconds from then until the state is loaded: imports, compilation"),
    "repair-hours": (24.0, "hours until a lost host is back"),
}

#: Texts of --help of the rates, in hours; 0 stands for never.
RATES = {
    "gpu": "mean hours between failures of a GPU, which take its host away",
    "host": "the same of a host",
    "network": "hours between failures of the network, per host, which end all processes",
    "software": "the same of programs",
    "planned": "hours between planned stops of the run, for which it saves in time",
}

#: Most runs, and most hosts: a search would take hours.
MAX_SEEDS, MAX_HOSTS = 10_000, 1 << 17


@dataclass(frozen=True)
class GoodputQuestion:
    """A parsed and checked command line."""

    options: argparse.Namespace
    policy: Policy
    scene: study.Scene


def parser(doc: str | None) -> Parser:
    """Return the parser. Args:     doc: the text of --help."""
    made = Parser("python -m jaxpar.goodput", doc, formatter_class=argparse.RawTextHelpFormatter)
    shown = lambda text: f"{text} (%(default)s)"  # noqa: E731
    most = Range(1, 8 * MAX_HOSTS, 16384)
    made.whole("--gpus", 16384, most, help=shown("number of GPUs"))
    made.whole("--gpus-per-host", 8, Range(1, 1024, 8), help=shown("GPUs of a host"))
    made.add_argument("--days", type=float, default=54.0, help=shown("length of the run"))
    made.whole("--seeds", 32, Range(2, MAX_SEEDS, 32), help=shown("number of simulated runs"))
    made.add_argument("--step-seconds", type=float, default=6.0, help=shown("time of a step"))
    steps = Range(0, 1_000_000, 100)
    made.whole("--disk-every", 300, steps, help=shown("steps between saves to disk; 0: none"))
    text = "steps between mirrors in the memory of another host; 0: none"
    made.whole("--memory-every", 0, steps, help=shown(text))
    for name, (default, text) in TIMES.items():
        made.add_argument(f"--{name}", type=float, default=default, help=shown(text))
    most = Range(0, MAX_HOSTS, 16)
    made.whole("--spares", 16, most, help=shown("hosts that wait to replace lost ones"))
    text = "fewest hosts that go on without the lost ones; 0: the run waits for all"
    made.whole("--fewest-hosts", 0, most, help=shown(text))
    for name, text in RATES.items():
        default = round(getattr(Rates(), name), 1)
        option = f"--{name}-hours"
        made.add_argument(option, type=float, default=default, help=shown(f"{text}; 0: never"))
    made.add_argument("--best", action="store_true", help="search the best steps between saves")
    text = "write a chart of the goodput by steps between saves, FILE.svg"
    made.add_argument("--svg", metavar="FILE", help=text)
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return made


def read_command(argv: Sequence[str], doc: str | None = None) -> GoodputQuestion:
    """Parse and check the command line.

    Raises:   ConfigError if an option is invalid.
    """
    made = parser(doc)
    options = made.parse_args(["--help"] if asks_help(argv) else argv)
    names = [*TIMES, *(f"{kind}-hours" for kind in RATES), "days", "step-seconds"]
    for name in names:
        _check_time(name, getattr(options, name.replace("-", "_")))
    if options.fixed_seconds > options.step_seconds:
        rule = f"is a part of a step, which takes {options.step_seconds:g} s"
        raise ConfigError("--fixed-seconds", options.fixed_seconds, rule, "use --fixed-seconds 0")
    check_file("--svg", options.svg)
    if options.gpus % options.gpus_per_host:
        rule = f"must be divisible by --gpus-per-host {options.gpus_per_host}"
        hosts = math.ceil(options.gpus / options.gpus_per_host)
        raise ConfigError("--gpus", options.gpus, rule, f"use {hosts * options.gpus_per_host}")
    hosts = options.gpus // options.gpus_per_host
    if options.memory_every and hosts % 2:
        rule = f"mirrors in pairs of hosts, but there are {hosts}"
        raise ConfigError("--memory-every", options.memory_every, rule, "use an even number")
    if options.fewest_hosts > hosts:
        rule = f"must be at most {hosts}, the number of hosts"
        raise ConfigError("--fewest-hosts", options.fewest_hosts, rule, f"use {hosts}")
    hours = {kind: getattr(options, f"{kind}_hours") or math.inf for kind in KINDS}
    seconds, seeds = options.days * DAY, range(options.seeds)
    scene = study.Scene(hosts, options.gpus_per_host, Rates(**hours), seconds, seeds)
    return GoodputQuestion(options, _policy(options), scene)


def _check_time(name: str, value: float) -> None:
    least = 1e-6 if name in ("days", "step-seconds") else 0.0
    if not least <= value <= 1e9:
        rule = f"must be a number of at least {least:g}"
        raise ConfigError(f"--{name}", value, rule, f"use --{name} {TIMES.get(name, (10.0,))[0]:g}")


def _policy(o: argparse.Namespace) -> Policy:
    return Policy(
        o.step_seconds,
        Saves(o.disk_every, o.disk_blocking, o.disk_seconds, o.disk_load),
        Saves(o.memory_every, o.memory_blocking, o.memory_seconds, o.memory_load),
        o.detect,
        o.restart,
        o.spares,
        o.repair_hours * HOUR,
        o.fewest_hosts,
        o.fixed_seconds,
    )


def answer(asked: GoodputQuestion) -> dict[str, Any]:
    """Simulate, print the result and return it as a record."""
    options, scene = asked.options, asked.scene
    with stage("simulating") as now:
        watch = lambda count, what: now.at(f"{count:,} {what}")  # noqa: E731
        results = {"as given": study.simulate(asked.policy, scene)}
        if options.best:
            results["best intervals"] = study.best_intervals(asked.policy, scene, watch)
        if options.svg:
            Path(options.svg).write_bytes(showing.chart(asked.policy, scene, watch))
    record = {
        "hosts": scene.hosts,
        "days": options.days,
        "seeds": options.seeds,
        "hours_between_failures": showing.hours_between(scene),
        "results": {name: showing.record(result) for name, result in results.items()},
        "policy": dataclasses.asdict(asked.policy),
    }
    if options.json:
        print(json.dumps(record, indent=2))
        return record
    print(showing.in_words(scene))
    print(showing.table(results))
    for line in showing.remarks(results):
        print(line)
    if options.svg:
        print(f"wrote {options.svg}")
    return record
