"""The command line of `python -m jaxpar.mup`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import as_called, parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.config.help import asks_help, print_help, topic_of
from jaxpar.config.rules.limits import Range
from jaxpar.config.validate import resolve
from jaxpar.runtime import exit_codes
from jaxpar.runtime import start as runtime
from jaxpar.runtime.options import Parser, check_file
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import make_mesh
from jaxpar.verification.coordinates.activations import ActivationSizes, measure
from jaxpar.verification.coordinates.growth import TOLERANCE, chart, growth, table, verdicts
from jaxpar.verification.coordinates.wider import prepared, widened

PROGRAM = "python -m jaxpar.mup"

EPILOG = """\
Any other option sets a field of the config: --model.mup.base-width 128. Exit codes: 0 flat, 1 sizes
grow or updates shrink with the width, 2 bad input."""

WIDTHS_HELP = """\
values of model.d_model, separated by commas. Heads and d_ff grow in proportion. Default: that of
the config, twice and four times it"""


def read_command(argv: Sequence[str], doc: str | None) -> tuple[argparse.Namespace, Config]:
    """Return the options, and the config with its overrides.

    Raises:   ConfigError for a wrong option or field.
    """
    parser = Parser(
        PROGRAM,
        as_called(doc or "").partition("\n")[0],
        usage=f"{as_called(PROGRAM)} CONFIG [options] [--section.field V ...]",
        epilog=EPILOG,
        add_help=False,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", help="name of a config, .py file or run folder")
    add("--widths", metavar="N,N,...", help=WIDTHS_HELP)
    parser.whole("--steps", 4, Range(1, 1000, 4), help="optimizer steps (%(default)s)")
    parser.whole("--seeds", 2, Range(1, 100, 2), help="initial weights to average (%(default)s)")
    told = "sequences of the batch (%(default)s)"
    parser.whole("--sequences", 4, Range(1, 1024, 4), help=told)
    parser.whole("--length", 128, Range(2, 1 << 20, 128), help="their tokens (%(default)s)")
    told = "exponents up to this count as flat (%(default)s)"
    add("--tolerance", type=float, default=TOLERANCE, help=told)
    add("--svg", metavar="FILE", help="write a chart of sizes against the width")
    if asks_help(argv):
        topic = topic_of(argv)
        if not topic:
            print(parser.format_help())
        first = argv[0] if not argv[0].startswith("-") else "quickstart"
        print_help(load_config(first), "", "", topic)
        sys.exit(0)
    options, overrides = parser.parse_known_args(argv)
    if options.config is None:
        raise ConfigError("CONFIG", None, "is missing", "begin with a config, such as quickstart")
    if not 0 < options.tolerance < 1:
        rule = "must be between 0 and 1"
        raise ConfigError("--tolerance", options.tolerance, rule, f"use {TOLERANCE}")
    check_file("--svg", options.svg)
    return options, parse_overrides(load_config(options.config), overrides, PROGRAM)


def widths_of(text: str | None, cfg: Config) -> list[int]:
    """Return the widths of `--widths`, ascending.

    Raises:   ConfigError unless they are two or more different whole numbers.
    """
    if text is None:
        return [cfg.model.d_model * times for times in (1, 2, 4)]
    try:
        widths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        widths = []
    if len(widths) < 2:
        rule = "must be two or more whole numbers, separated by commas"
        fix = f"use --widths {','.join(map(str, widths_of(None, cfg)))}"
        raise ConfigError("--widths", text, rule, fix)
    return widths


def check_coordinates(options: argparse.Namespace, asked: Config) -> int:
    """Measure every width, print the table, and return the exit code."""
    cfg = prepared(asked, options.sequences, options.length)
    configs = {width: resolve(widened(cfg, width), 1) for width in widths_of(options.widths, asked)}
    rendezvous.require_single_process("jaxpar.mup")
    runtime.start(Config(run=asked.run))
    title, under = _conditions(options, cfg)
    print(f"{title}: {under}", flush=True)
    found: dict[int, ActivationSizes] = {}
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    with jax.default_matmul_precision("highest"):
        for width, of_width in configs.items():
            with stage(f"training at width {width}"):
                found[width] = measure(of_width, mesh, options.steps, options.seeds)
    exponents = growth(found)
    print(f"\nmean |activation| after step {options.steps}, by d_model\n")
    print(table(found, exponents, options.tolerance))
    if options.svg:
        Path(options.svg).write_bytes(chart(found, title, under))
        print(f"\nwrote {options.svg}")
    wrong = verdicts(exponents, options.tolerance)
    print("\n" + ("; ".join(wrong) if wrong else "flat: no activation depends on the width"))
    return exit_codes.EXIT_ERROR if wrong else exit_codes.EXIT_OK


def _conditions(options: argparse.Namespace, cfg: Config) -> tuple[str, str]:
    """Return the title and the conditions of the check."""
    o, m = cfg.optimizer, cfg.model
    kind = "standard parametrization" if m.mup is None else f"µP, base width {m.mup.base_width}"
    batch = f"{options.sequences} x {options.length} random tokens, seeds {options.seeds}"
    rate = f"{o.name} at {o.learning_rate:g}"
    return f"{options.config}, {kind}", f"{rate}, {options.steps} steps on {batch}"
