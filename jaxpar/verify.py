"""Check that meshes compute what the plain model computes.

    python -m jaxpar.verify llama3_8b --shrink --mesh data=2,tensor=2 --mesh pipeline=2,sequence=2

On simulated CPU devices, or on the accelerators that are there, each mesh trains for a few steps on
random packed documents, in float32, and is compared with `model/reference.py` and optax on one
device. What must hold, `t` being --tolerance:

    weights at init   the same bits on every mesh
    loss              of every step: within t, relative
    gradients         of every parameter: largest error within t of its largest gradient
    weights after     of every parameter: mean error within t * (1 + ln(1/t)) of the mean change

The last is a mean because Adam moves an element by about lr * g / |g|, whatever the size of its
gradient g: where g is no larger than the error d of gradients, the move is arbitrary on any mesh,
and no useful bound holds for the largest error. With gradients spread evenly up to s, the mean of
min(1, d / |g|) is (d / s) * (1 + ln(s / d)), and d / s is at most t. That is of one step. Of the
next, all gradients are off by what such moves did to the loss; so Adam's eps is raised until they
are small (`parity.steady`). What is compared is in `parity.py`.
"""

import argparse
import dataclasses
import math
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxpar import guard, parity, processes, runtime
from jaxpar.axes import AXES
from jaxpar.cli import load_config, parse_overrides, run_program
from jaxpar.config import Config, ConfigError, ParallelConfig, RunConfig
from jaxpar.model.transformer import param_specs
from jaxpar.parallel.mesh import axis_sizes, make_mesh
from jaxpar.params import count
from jaxpar.validation import resolve

PROGRAM = "python -m jaxpar.verify"

#: Parameters above which a step of the plain reference takes minutes on a CPU.
LARGEST_ON_CPU = 50_000_000

#: Simulated devices when neither --devices nor --mesh says how many.
DEFAULT_DEVICES = 8

#: Without --mesh: those of these that fit the devices.
DEFAULT_MESHES = (
    "data=1",
    "data=2",
    "tensor=2",
    "sequence=2",
    "pipeline=2,num_microbatches=4",
    "replica=2,data=2",
    "data=2,tensor=2,zero=1",
    "data=2,sequence=2,context=ring",
    "pipeline=2,data=2,tensor=2,num_microbatches=2",
    "data=2,sequence=2,tensor=2",
    "pipeline=2,data=2,sequence=2,tensor=2,num_microbatches=2",
)

COLUMNS = ("mesh", "weights at init", "loss", "worst gradient", "weights after", "verdict")

EPILOG = """\
Any other option is a field of the config, all listed below: --model.d-model 64. Fields of the
parallel section other than the axes hold for every mesh that does not set them itself. Exit codes:
0 all agree, 1 a mismatch, 2 bad input."""


def main(argv: Sequence[str]) -> int:
    """Compare every mesh and print the table; the exit code."""
    options, overrides = parse_options(argv)
    asked = parse_overrides(load_config(options.config), overrides, PROGRAM)
    cfg = parity.float32(asked)
    meshes = parse_meshes(options.mesh or DEFAULT_MESHES, cfg.parallel)
    refuse_rounding(meshes, cfg.parallel)
    if options.shrink:
        cfg = parity.shrink(cfg, list(meshes.values()))
        cfg = parity.float32(parse_overrides(cfg, overrides, PROGRAM))
    cfg = parity.steady(cfg)
    needed = max(map(num_devices, meshes.values())) if options.mesh else DEFAULT_DEVICES
    devices = start_devices(asked.run, options.devices or asked.run.cpu_devices, needed)
    configs = resolve_meshes(cfg, meshes, len(devices), given=bool(options.mesh))
    refuse_large(cfg, devices)
    print_conditions(options, asked, cfg, devices)
    with jax.default_matmul_precision("highest"):
        rows = compare_meshes(cfg, configs, devices, options.steps, options.tolerance)
        wrong = print_table(rows, options.steps, max(map(len, configs)))
    print("\n".join(wrong) if wrong else f"{len(configs)} of {len(configs)} agree")
    return guard.EXIT_ERROR if wrong else guard.EXIT_OK


@dataclasses.dataclass(frozen=True)
class Row:
    """One mesh, compared."""

    mesh: str
    loss: float
    found: parity.Comparison

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of COLUMNS."""
        f = self.found
        named = lambda pair: f"{pair[0]:.1e} {pair[1]}" if pair else "-"  # noqa: E731
        init = f"{len(f.differing)} differ" if f.differing else "same bits"
        loss = f"{self.loss:.6f} ({f.loss:.1e})"
        verdict = "MISMATCH" if f.mismatches() else "ok"
        return self.mesh, init, loss, named(f.gradient), named(f.update), verdict


def compare_meshes(
    cfg: Config,
    configs: dict[str, Config],
    devices: Sequence[jax.Device],
    steps: int,
    tolerance: float,
) -> Iterable[Row]:
    """A Row for each mesh, as it is done."""
    batches = [parity.random_batch(cfg, i) for i in range(max(steps, 1))]
    wanted = parity.reference_trace(cfg, batches, steps)
    options = parity.QUICK_COMPILE if devices[0].platform == "cpu" else None
    for name, on_mesh in configs.items():
        mesh = make_mesh(on_mesh.parallel, devices[: math.prod(axis_sizes(on_mesh.parallel))])
        found = parity.mesh_trace(on_mesh, mesh, batches, steps, options)
        yield Row(name, found.loss, parity.compare(found, wanted, tolerance))


# ------------------------------------------------------------------------------ the request


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("command line", " ".join(sys.argv[1:]), message, "see --help")


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The program's own options, and what is left: overrides of the config."""
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} CONFIG [--mesh AXIS=N,...] [options] [--section.field VALUE ...]",
        description="Compare the weights, losses, gradients and optimiser steps of meshes with a "
        "plain, unsharded reference, in float32 on random packed documents.",
        epilog=EPILOG,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", help="a name from configs/, or a .py file")
    add("--mesh", action="append", metavar="AXIS=N,...", help=MESH_HELP)
    add("--steps", type=int, default=5, help="optimiser steps; 0: gradients only (%(default)s)")
    add("--shrink", action="store_true", help=SHRINK_HELP)
    add("--tolerance", type=float, default=1e-5, help="relative error allowed (%(default)s)")
    add("--devices", type=int, metavar="N", help=DEVICES_HELP)
    add("-h", "--help", action="store_true", help="show this, and exit")
    options, overrides = parser.parse_known_args(argv)
    if options.help:
        parser.print_help()
        parse_overrides(load_config(options.config or "quickstart"), ["--help"], PROGRAM)
    _check_options(options)
    return options, overrides


MESH_HELP = """\
a mesh to check; give it again for more. Axes that are not named are 1. Any other field of the
parallel section may follow: pipeline=2,num_microbatches=4,virtual_stages=2,zero=1,context=ring.
Default: a selection that fits the devices"""
SHRINK_HELP = """\
first reduce the model to a small one of the same kind: same flags, same ratios of heads and widths,
sizes that the meshes divide. Overrides come after"""
DEVICES_HELP = """\
simulate N CPU devices. Default: the accelerators that JAX finds, else as many CPU devices as the
meshes need"""


def _check_options(options: argparse.Namespace) -> None:
    if options.config is None:
        raise ConfigError("CONFIG", None, "is missing", "name a file of configs/: quickstart")
    if options.steps < 0:
        raise ConfigError("--steps", options.steps, "must not be negative", "use 5")
    if not 0 < options.tolerance < 1:
        raise ConfigError("--tolerance", options.tolerance, "must be between 0 and 1", "use 1e-5")
    if options.devices is not None and options.devices < 1:
        raise ConfigError("--devices", options.devices, "must be at least 1", "use 8")


def parse_meshes(items: Sequence[str], parallel: ParallelConfig) -> dict[str, ParallelConfig]:
    """The parallel section of each mesh item: `parallel`, with every axis 1 unless named."""
    ones = dict.fromkeys((*AXES, "virtual_stages"), 1)
    return {item: dataclasses.replace(parallel, **ones | _parse_mesh(item)) for item in items}


def refuse_rounding(meshes: dict[str, ParallelConfig], parallel: ParallelConfig) -> None:
    """Raise ConfigError for a mesh that would round what float32 does not: `parity.float32` resets
    such fields of the config, and what they need of the model with them."""
    for name, mesh in meshes.items():
        for field in ("gather_dtype", "grad_reduce"):
            value = getattr(mesh, field)
            if value != getattr(parallel, field):
                rule = f"sets {field}, and verify compares in float32"
                raise ConfigError("--mesh", name, rule, f"leave out {field}={value}")


def _parse_mesh(text: str) -> dict[str, Any]:
    hints, values = typing.get_type_hints(ParallelConfig), {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if name not in hints or not value:
            fix = f"join items such as data=2 by commas, with names from {', '.join(hints)}"
            raise ConfigError("--mesh", text, f"{item!r} is no field=value", fix)
        if name in values:
            raise ConfigError("--mesh", text, f"{name} is given twice", "give it once")
        values[name] = _typed(text, name, value, hints[name])
    return values


def _typed(text: str, name: str, value: str, hint: Any) -> int | str:
    """A field's value: whole numbers above 0 where the field is a number."""
    if hint is str or isinstance(next(iter(typing.get_args(hint)), None), str):
        return value
    if not value.isdecimal() or int(value) == 0:
        rule = f"{name} must be a whole number above 0"
        raise ConfigError("--mesh", text, rule, f"use {name}=2")
    return int(value)


def start_devices(run: RunConfig, simulated: int, needed: int) -> list[jax.Device]:
    """Start JAX's backend: `simulated` CPU devices, or if that is 0, the accelerators there are.

    Args:     needed: CPU devices to simulate where there are no accelerators.
    """
    processes.alone("jaxpar.verify")
    try:
        runtime.start(Config(run=dataclasses.replace(run, cpu_devices=simulated)))
        if not simulated:
            jax.config.update("jax_num_cpu_devices", needed)
    except RuntimeError:
        pass  # a notebook has started JAX: its devices serve, and `resolve_meshes` counts them
    return jax.devices()


def num_devices(parallel: ParallelConfig) -> int:
    """Devices that a mesh takes."""
    return math.prod(axis_sizes(parallel))


def resolve_meshes(
    cfg: Config, meshes: dict[str, ParallelConfig], available: int, *, given: bool
) -> dict[str, Config]:
    """The resolved config of each mesh.

    Raises:   ConfigError for a mesh that was asked for and cannot be. Of the default ones, those
              are left out, and it is said why, unless they are only too large; what is wrong
              with all of them alike is raised.
    """
    configs: dict[str, Config] = {}
    left_out: dict[str, ConfigError] = {}
    for name, parallel in meshes.items():
        needed = num_devices(parallel)
        try:
            if needed > available:
                rule = f"needs {needed} devices, and there are {available}"
                raise ConfigError("--mesh", name, rule, f"simulate them with --devices {needed}")
            configs[name] = resolve(dataclasses.replace(cfg, parallel=parallel), needed)
        except ConfigError as error:
            if given:
                raise
            if needed <= available:
                left_out[name] = error
    if not configs and len(set(map(str, left_out.values()))) == 1:
        raise next(iter(left_out.values()))  # of the config, whatever the mesh
    for name, why in left_out.items():
        print(f"left out {name}: {why}")
    if not configs:
        raise ConfigError("--mesh", None, "no default mesh fits this config", "add --shrink")
    return configs


def refuse_large(cfg: Config, devices: Sequence[jax.Device]) -> None:
    """Raise ConfigError for a model that a CPU would take too long over."""
    size = count(param_specs(cfg.model))
    if devices[0].platform == "cpu" and size > LARGEST_ON_CPU:
        rule = f"a CPU takes too long over more than {LARGEST_ON_CPU} parameters"
        raise ConfigError("number of parameters", size, rule, "add --shrink")


# -------------------------------------------------------------------------------- the table


def print_conditions(
    options: argparse.Namespace, asked: Config, cfg: Config, devices: Sequence[jax.Device]
) -> None:
    """What is compared, and in which precision."""
    m, kind, n = cfg.model, devices[0].device_kind, len(devices)
    changed = f" instead of {asked.model.dtype}" if asked.model.dtype != m.dtype else ""
    lines = (
        f"{options.config}{', shrunk' if options.shrink else ''}: {count(param_specs(m)):,} "
        f"parameters; {m.num_layers} layers, d_model {m.d_model}, {m.num_heads} heads on "
        f"{m.num_kv_heads} of {m.head_dim}, d_ff {m.d_ff}, vocabulary {m.vocab_size}",
        f"{cfg.train.global_batch_size} windows of {cfg.data.seq_len} tokens a step, random packed "
        f"documents, seed {cfg.train.seed}",
        f"float32{changed}, highest matmul precision, reference attention; tolerance "
        f"{options.tolerance:g} (weights after: {parity.update_tolerance(options.tolerance):.1e})"
        + (f"; Adam's eps {cfg.optimizer.eps:.1e}" if cfg.optimizer.name == "adamw" else ""),
        f"{n} simulated CPU devices" if kind == "cpu" else f"{n} {kind}",
    )
    print("\n".join(lines), flush=True)


def print_table(rows: Iterable[Row], steps: int, width: int) -> list[str]:
    """Print the rows, in plain text each when it is done; what does not agree, in words.

    Args:     width: of the longest name of a mesh.
    """
    columns = [f"{c} {steps} steps" if c == "weights after" else c for c in COLUMNS]
    done = _print_rich(rows, columns) if sys.stdout.isatty() else _print_plain(rows, columns, width)
    return [f"{row.mesh}: {what}" for row in done for what in row.found.mismatches()]


def _print_rich(rows: Iterable[Row], columns: Sequence[str]) -> list[Row]:
    console, table, done = Console(), Table(*columns), []
    with console.status("compiling and running ...") as status:
        for row in rows:
            done.append(row)
            status.update(f"compiling and running ... {len(done)} done, last: {row.mesh}")
            style = "bold red" if row.found.mismatches() else None
            table.add_row(*map(escape, row.cells()), style=style)
    console.print(table)
    return done


def _print_plain(rows: Iterable[Row], columns: Sequence[str], width: int) -> list[Row]:
    line = f"{{:<{width}}}  {{:<15}}  {{:<18}}  {{:<25}}  {{:<25}}  {{}}".format
    print(line(*columns), flush=True)
    done = []
    for row in rows:
        done.append(row)
        print(line(*row.cells()), flush=True)
    return done


if __name__ == "__main__":
    run_program(main)
