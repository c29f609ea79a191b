"""Measure scaling: python -m jaxpar.bench scaling CONFIG [--gpus 1,2,4] [--axis data] [...]

Times the train step of a config on 1, 2, 4, ... devices of this host, each time in a new process.
Prints tokens per second per device, and the efficiency: relative to the fewest devices. One axis of
the mesh grows with the devices. In weak scaling the batch grows too; in strong scaling it is the
config's. The config's batch is that of the fewest devices. docs/benchmarking.md has the details.

Without GPUs, --run.cpu-devices N simulates devices, which share the cores of this host.
"""

import argparse
import functools
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxpar.bench.scaling import child, points, results
from jaxpar.bench.scaling.child import PointFailed
from jaxpar.bench.scaling.points import GROWING, MODES, ScalingPoint
from jaxpar.bench.training.command import refuse_fields_of_a_run
from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import read_config
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.config.numerals import only_digits
from jaxpar.config.rules.limits import MAX_CPU_DEVICES, Range
from jaxpar.config.rules.run import MAX_PROFILED_STEPS
from jaxpar.runtime import exit_codes, provenance
from jaxpar.runtime.files import atomic, json_output
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.options import Parser, check_file
from jaxpar.runtime.processes import detect, rendezvous
from jaxpar.runtime.stages import stage

PROGRAM = "python -m jaxpar.bench scaling"

type Measure = Callable[[ScalingPoint], dict[str, Any]]


def read_command(argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Parse and check the options, and the config with its overrides.

    `options.config` has the words of the config.
    """
    parser = Parser(PROGRAM, __doc__)
    add = parser.add_argument
    told = "numbers of devices (powers of two, up to all devices)"
    add("--gpus", metavar="N,N", help=told)
    told = f"the axis that grows, or several, one after another: {', '.join(GROWING)} (data)"
    add("--axis", default="data", metavar="AXIS", help=told)
    add("--weak", action="store_true", help="only weak scaling: the batch grows with the devices")
    add("--strong", action="store_true", help="only strong scaling: the batch stays the same")
    parser.whole("--steps", 20, Range(1, 1_000_000, 20), help="timed steps of each point (20)")
    profiled = Range(0, MAX_PROFILED_STEPS, 2)
    told = "profiled steps of each point, for a column with exposed communication (0: none)"
    parser.whole("--profile-steps", 0, profiled, help=told)
    add("--card", help="JSON file to write the results to")
    add("--plot", metavar="FILE.svg", help="file to draw the efficiencies to")
    add("--commit", help="commit to record on the card, if there is no checkout")
    options, options.config = parser.parse_known_args(argv)
    cfg = without_schedules(read_config(options.config, "jaxpar.bench scaling", __doc__))
    refuse_fields_of_a_run(cfg, options.config)
    options.gpus = None if options.gpus is None else _counts(options.gpus)
    options.axis = _axes(options.axis)
    options.modes = [mode for mode in MODES if getattr(options, mode)] or list(MODES)
    check_file("--card", options.card)
    check_file("--plot", options.plot)
    if options.plot is not None and Path(options.plot).suffix.lower() != ".svg":
        fix = f"use --plot {shlex.quote(str(Path(options.plot).with_suffix('.svg')))}"
        raise ConfigError("--plot", options.plot, "must end in .svg: the plot is an SVG file", fix)
    return options, cfg


def _counts(text: str) -> list[int]:
    """Return the numbers of devices, ascending."""
    words, fix = [word.strip() for word in text.split(",")], "use --gpus 1,2,4"
    short = all(only_digits(word) and len(word) < 9 for word in words)
    if not short or not all(0 < int(word) <= MAX_CPU_DEVICES for word in words):
        rule = f"must be whole numbers from 1 to {MAX_CPU_DEVICES:,}, separated by commas"
        raise ConfigError("--gpus", text, rule, fix)
    counts = sorted({int(word) for word in words})
    if len(counts) < 2:
        raise ConfigError("--gpus", text, "must be at least two numbers, to compare", fix)
    return counts


def _axes(text: str) -> list[str]:
    axes = list(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(axis in GROWING for axis in axes):
        rule = f"must be one or several of {', '.join(GROWING)}, separated by commas"
        raise ConfigError("--axis", text, rule, "use --axis data")
    return axes


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code: 1 if a point could not be measured."""
    options, cfg = read_command(argv)
    rendezvous.require_single_process("jaxpar.bench scaling")
    if detect.detect(cfg, os.environ) is not None:
        rule = "connects several processes, but scaling is measured on one host by one process"
        raise ConfigError("cluster.num_processes", cfg.cluster.num_processes, rule, "remove it")
    command = shlex.join([*PROGRAM.split(), *argv])
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        words = [*options.config, "--steps", str(options.steps)]
        words += ["--profile-steps", str(options.profile_steps)]
        if commit := options.commit or provenance.checked_out_commit():
            words += ["--commit", commit]
        measure = functools.partial(child.measure, command=words, folder=Path(folder))
        return run(options, cfg, command, measure)


def run(options: argparse.Namespace, cfg: Config, command: str, measure: Measure) -> int:
    """Measure every point, and write the table, the card and the plot. Returns:  the exit code.

    The card is written after each point. A point that fails does not end the others, unless the
    config is wrong before any was measured.
    """
    present = devices_here(cfg)
    counts = options.gpus or points.counts_for(cfg, options.axis, present)
    points.check_present(counts, present)
    plan = points.all_points(cfg, counts, options.axis, options.modes)
    measured: dict[tuple[tuple[str, Any], ...], dict[str, Any] | PointFailed] = {}
    number, rows = len({point.settings for point in plan}), list[results.Row]()
    first: dict[str, Any] | None = None
    for point in plan:
        if point.settings not in measured:
            print_line(f"{len(measured) + 1} of {number}: {point.name}")
            found = measured[point.settings] = _measured(point, measure)
            if isinstance(found, PointFailed) and found.code == exit_codes.EXIT_CONFIG and not rows:
                print(found, file=sys.stderr)
                return exit_codes.EXIT_CONFIG
            _tell(found)
        found = measured[point.settings]
        if isinstance(found, PointFailed):
            rows.append(results.row_of(point, None, str(found)))
            continue
        rows.append(results.row_of(point, found))
        first = first or found
        if options.card:
            made = results.card(cfg, first, options.steps, command, results.with_efficiency(rows))
            json_output.write("--card", options.card, made)
    rows = results.with_efficiency(rows)
    print_line("\n" + results.table(rows))
    if first is not None:
        if options.card:  # also with failures after the last success
            made = results.card(cfg, first, options.steps, command, rows)
            json_output.write("--card", options.card, made)
        if options.plot:
            _draw(options, rows, first)
    failed = any("error" in row for row in rows)
    return exit_codes.EXIT_ERROR if failed else exit_codes.EXIT_OK


def devices_here(cfg: Config) -> int:
    """Return the number of devices to measure on. Starts no backend."""
    if cfg.run.cpu_devices:
        return cfg.run.cpu_devices
    return visible.visible_gpus() if visible.gpu_is_present() else 1


def _measured(point: ScalingPoint, measure: Measure) -> dict[str, Any] | PointFailed:
    """Return a point's card, or its failure."""
    try:
        with stage(f"measuring {point.name}"):
            return measure(point)
    except PointFailed as error:
        return error


def _tell(found: dict[str, Any] | PointFailed) -> None:
    """Print a point's speed, or its error after the end of its output."""
    if isinstance(found, PointFailed):
        if found.code != exit_codes.EXIT_CONFIG:
            print(found.output, file=sys.stderr)
        print_line(f"   failed: {found}")
        return
    rate, step = found["tokens_per_second_per_device"], found["step_seconds"]["median"]
    print_line(f"   {rate:,.0f} tokens/s/device, {step * 1e3:,.1f} ms per step")


def _draw(options: argparse.Namespace, rows: Sequence[results.Row], first: dict[str, Any]) -> None:
    kind = first["device"].partition(" x ")[2]
    under = f"{options.config[0]}, {kind}, jaxpar {first['jaxpar']} {first['commit']}".strip()
    path = Path(options.plot)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, results.plot(rows, under))
    except OSError as error:
        why = f"--plot = {options.plot!r}: cannot be written: {error.strerror or error}"
        raise exit_codes.RunError(why) from error
    print_line(f"plot: {options.plot}")


def print_line(line: str) -> None:
    """Print a line of progress or results."""
    print(line, flush=True)
