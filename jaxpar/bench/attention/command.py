"""Measure the attention backends: python -m jaxpar.bench attention [--shapes ...] [--card FILE]

Runs each shape forward, backward and both on each backend, interleaved in one process. Rates count
only the (query, key) pairs that the mask allows. Errors are relative to float32 attention of the
same values. With --tune, tries the block sizes of jaxpar's kernels instead, and writes the fastest
to the table from which a backend is chosen. docs/benchmarking.md has the details.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpar.bench.attention import contest, tuning
from jaxpar.bench.attention.shapes import NAMED, AttentionShape, parse_shapes
from jaxpar.bench.training import conditions
from jaxpar.config import Config, ConfigError
from jaxpar.kernels.attention.dispatch import capability
from jaxpar.runtime import exit_codes, provenance
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import json_output
from jaxpar.runtime.options import check_file
from jaxpar.runtime.options import parser as make_parser
from jaxpar.runtime.processes import rendezvous

PROGRAM = "python -m jaxpar.bench attention"

#: Batches per program, without --tune.
REPEATS = 15

SHAPES_HELP = f"""\
any of {", ".join(NAMED)}, separated by commas; or sizes B,T,H,G,D of a causal shape, or
KIND:B,T,H,G,D (default: all named shapes)"""


def read_command(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options: shapes as `AttentionShape`s, backends as a list or None.

    Raises:   ConfigError for an unknown shape or backend.
    """
    told = f"{REPEATS}; with --tune {tuning.REPEATS}"
    parser = make_parser(PROGRAM, __doc__, repeats=None, told=told)
    add = parser.add_argument
    add("--shapes", nargs="+", default=list(NAMED), metavar="SHAPE", help=SHAPES_HELP)
    add(
        "--backends",
        help=f"backends to run: {','.join(contest.BACKENDS)} (default: all for this device)",
    )
    add("--tune", action="store_true", help="try block sizes and write the table of measurements")
    add("--table", help="with --tune: table to write or update (default: the table of this GPU)")
    options = parser.parse_args(argv)
    options.shapes = parse_shapes(options.shapes)
    if options.backends is not None:
        options.backends = options.backends.split(",")
        for name in options.backends:
            if name not in contest.BACKENDS:
                rule = f"{name!r} is not one of {', '.join(contest.BACKENDS)}"
                raise ConfigError("--backends", ",".join(options.backends), rule, "use only those")
    if options.repeats is None:
        options.repeats = tuning.REPEATS if options.tune else REPEATS
    check_file("--card", options.card)
    if options.table is not None:
        if not options.tune:
            raise ConfigError("--table", options.table, "is used only with --tune", "add --tune")
        check_file("--table", options.table)
        tuning.read_table(Path(options.table))
    return options


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code: 1 if a supported measurement failed.

    With --tune, 1 if a supported backend has no working block sizes.
    """
    options = read_command(argv)
    rendezvous.require_single_process("jaxpar.bench attention")
    environment = runtime.start(Config())
    on_gpu = jax.devices()[0].platform == "gpu"
    able = capability.CAPABILITIES
    backends = options.backends or [name for name in able if able[name].needs_gpu == on_gpu]
    table = None
    if options.tune:
        table = Path(options.table) if options.table else tuning.default_table()
        tuning.own_table(table)
    if not on_gpu:
        _refuse_large(options.shapes)
    commit = options.commit or provenance.checked_out_commit()
    command = shlex.join([*PROGRAM.split(), *argv])
    card: dict[str, Any] = {
        "what": "attention block sizes" if options.tune else "attention",
        **conditions.of_this_process(environment, commit),
        "cudnn": conditions.cudnn_version(),
        "command": command,
        "repeats": options.repeats,
        "rows": [],
    }
    run = tuning.tune if options.tune else contest.measure
    for number, shape in enumerate(options.shapes, start=1):
        log = lambda text, n=number: print(  # noqa: E731
            f"[{n}/{len(options.shapes)}] {text}", file=sys.stderr, flush=True
        )
        rows = run(shape, backends, options.dtype, options.repeats, log)
        print(table_of(shape, options.dtype, rows), flush=True)
        card["rows"] += rows
        if options.card:  # after each shape, so that an interrupted run keeps its results
            json_output.write("--card", options.card, card)
        if table is not None:
            print(f"{winners(rows)}\n{tuning.merge(table, rows, commit, command)}\n", flush=True)
    rows = card["rows"]
    failed = tuning.hopeless(rows) if options.tune else [row for row in rows if "failed" in row]
    if failed:
        print(f"{len(failed)} of {len(rows)} measurements failed", file=sys.stderr)
    return exit_codes.EXIT_ERROR if failed else exit_codes.EXIT_OK


def _refuse_large(shapes: Sequence[AttentionShape]) -> None:
    """Check the shapes for the reference, which stores all scores and runs without a GPU.

    Raises:   ConfigError for a shape that would take minutes and gigabytes.
    """
    for shape in shapes:
        if shape.B * shape.H * shape.T * shape.S > 2**28:
            rule = "needs a GPU: without one, the reference stores B H T S scores"
            raise ConfigError("--shapes", str(shape), rule, "use --shapes 1,256,2,1,64")


# ----------------------------------------------------------------------------------- printing

COLUMNS = ("direction", "backend", "ms", "TFLOP/s", "x cuDNN", "yardstick", "error")
WIDTHS = (9, 32, 9, 8, 8, 9, 8)


def table_of(shape: AttentionShape, dtype: str, rows: Sequence[contest.Row]) -> str:
    """Format the rows of a shape below a line that describes it."""
    what = shape.yardstick()[0] if any("yardstick" in row for row in rows) else ""
    extra = f", window {shape.window}" if shape.window else ""
    extra += f", {len(shape.documents)} documents" if shape.documents else ""
    extra += f"; yardstick: {what}" if what else ""
    lines = [f"{shape}, {dtype}{extra}", aligned(COLUMNS)]
    return "\n".join([*lines, *(aligned(cells(row)) for row in rows)]) + "\n"


def aligned(texts: Sequence[str]) -> str:
    """Align names to the left and figures to the right; further texts are appended."""
    padded = [
        text.ljust(width) if i < 2 else text.rjust(width)
        for i, (text, width) in enumerate(zip(texts, WIDTHS, strict=False))
    ]
    return "  ".join(["", *padded, *texts[len(WIDTHS) :]]).rstrip()


def cells(row: contest.Row) -> list[str]:
    """Return a row's texts in the order of COLUMNS, and the reason if it failed."""
    start = [row["direction"], tuning.words(row)]
    for why in ("refused", "failed"):
        if why in row and "ms" not in row:
            return [*start, *["-"] * (len(COLUMNS) - 2), f"{why}: {row[why]}"]
    number = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    return [
        *start,
        number(row["ms"], ".3f"),
        number(row["tflops"], ".1f"),
        number(row.get("times_cudnn"), ".2f"),
        number(row.get("yardstick", {}).get("ratio"), ".2f"),
        number(max(row.get("error", {}).values(), default=None), ".1e"),
        row.get("failed", ""),
    ]


def winners(rows: Sequence[contest.Row]) -> str:
    """Format the fastest backend and block sizes of each direction."""
    return "\n".join(
        f"  fastest {row['direction']}: {tuning.words(row)}" for row in tuning.fastest(rows)
    )
