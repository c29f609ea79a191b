"""Measure recurrences: python -m jaxpar.bench recurrence [--shapes ...] [--beside fla]

Runs each shape forward, backward and both on each backend, interleaved in one process. Errors are
relative to the recurrence in float32 of the same values. --beside fla also times the kernels of
flash-linear-attention, in a process of a Python that has it and PyTorch. docs/benchmarking.md has
the details.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxpar.bench.recurrence import contest
from jaxpar.bench.recurrence.beside import fla_rows
from jaxpar.bench.recurrence.shapes import NAMED, RecurrenceProblem, parse
from jaxpar.bench.training import conditions
from jaxpar.config import Config, ConfigError
from jaxpar.config.rules.limits import Range, most_of
from jaxpar.kernels.recurrence import BACKENDS
from jaxpar.runtime import exit_codes, provenance
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import json_output
from jaxpar.runtime.options import check_file
from jaxpar.runtime.options import parser as make_parser
from jaxpar.runtime.processes import rendezvous

PROGRAM = "python -m jaxpar.bench recurrence"

SHAPES_HELP = f"""\
any of {", ".join(NAMED)}; or sizes B,T,G,H,K,V of the gated delta rule, or
state_space:B,T,G,H,K,V (default: all named shapes)"""

COLUMNS = ("direction", "backend", "ms", "TFLOP/s", "x reference", "error")
WIDTHS = (9, 9, 9, 8, 11, 8)


def read_command(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options: shapes as `RecurrenceProblem`s.

    Raises:   ConfigError for an unknown shape or backend.
    """
    parser = make_parser(PROGRAM, __doc__, repeats=15)
    add = parser.add_argument
    add("--shapes", nargs="+", default=list(NAMED), metavar="SHAPE", help=SHAPES_HELP)
    names = ",".join(BACKENDS)
    add("--backends", default=names, help="backends to run (%(default)s)")
    chunk = Range(1, most_of("model.recurrent_chunk"), 64)
    parser.whole("--chunk", 64, chunk, help="tokens of a chunk (%(default)s)")
    add("--beside", choices=("fla",), help="also time these kernels, of another project")
    add("--beside-python", default=sys.executable, help="Python that has them (this one)")
    options = parser.parse_args(argv)
    options.shapes = [parse(text, options.chunk, options.dtype) for text in options.shapes]
    options.backends = options.backends.split(",")
    for name in options.backends:
        if name not in BACKENDS:
            rule = f"{name!r} is not one of {', '.join(BACKENDS)}"
            raise ConfigError("--backends", ",".join(options.backends), rule, "use only those")
    check_file("--card", options.card)
    return options


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code: 1 if a supported measurement failed."""
    options = read_command(argv)
    rendezvous.require_single_process("jaxpar.bench recurrence")
    environment = runtime.start(Config())
    if jax.devices()[0].platform != "gpu":
        _refuse_large(options.shapes)
    commit = options.commit or provenance.checked_out_commit()
    card: dict[str, Any] = {
        "what": "recurrence",
        **conditions.of_this_process(environment, commit),
        "command": shlex.join([*PROGRAM.split(), *argv]),
        "repeats": options.repeats,
        "rows": [],
    }
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    for problem in options.shapes:
        rows = contest.measure(problem, options.backends, options.repeats, log)
        if options.beside:
            log(f"{problem}: {options.beside}")
            rows += fla_rows(problem, options.beside_python, options.repeats)
        print(table_of(problem, rows), flush=True)
        print(verdict(rows), flush=True)
        card["rows"] += rows
        if options.card:  # after each shape, so that an interrupted run keeps its results
            json_output.write("--card", options.card, card)
    failed = [row for row in card["rows"] if "failed" in row]
    if failed:
        print(f"{len(failed)} of {len(card['rows'])} measurements failed", file=sys.stderr)
    return exit_codes.EXIT_ERROR if failed else exit_codes.EXIT_OK


def _refuse_large(problems: Sequence[RecurrenceProblem]) -> None:
    """Raises:   ConfigError for a shape that would take minutes without a GPU."""
    for problem in problems:
        if problem.flops("both") > 1e10:
            rule = "needs a GPU: without one, it would take minutes"
            raise ConfigError("--shapes", str(problem), rule, "use --shapes 1,256,2,4,64,64")


# ----------------------------------------------------------------------------------- printing


def table_of(problem: RecurrenceProblem, rows: Sequence[contest.Row]) -> str:
    """Format the rows of a shape below a line that describes it."""
    lines = [str(problem), _aligned(COLUMNS), *(_aligned(_cells(row)) for row in rows)]
    return "\n".join(lines) + "\n"


def _aligned(texts: Sequence[str]) -> str:
    """Align names to the left and figures to the right; a further text is appended."""
    padded = [
        text.ljust(width) if i < 2 else text.rjust(width)
        for i, (text, width) in enumerate(zip(texts, WIDTHS, strict=False))
    ]
    return "  ".join(["", *padded, *texts[len(WIDTHS) :]]).rstrip()


def _cells(row: contest.Row) -> list[str]:
    start = [row["direction"], row["backend"]]
    for why in ("refused", "failed"):
        if why in row and "ms" not in row:
            return [*start, *["-"] * (len(COLUMNS) - 2), f"{why}: {row[why]}"]
    number = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    return [
        *start,
        number(row["ms"], ".3f"),
        number(row["tflops"], ".1f"),
        number(row.get(f"times_{contest.RIVAL}"), ".2f"),
        number(max(row.get("error", {}).values(), default=None), ".1e"),
        row.get("failed", f"kernels {row['kernel_ms']:.3f} ms" if "kernel_ms" in row else ""),
    ]


def verdict(rows: Sequence[contest.Row]) -> str:
    """Say what the figures decide: whether `auto` should take the kernels on this GPU."""
    by = {(row["direction"], row["backend"]): row for row in rows if "failed" not in row}
    ours, plain, other = (by.get(("both", name), {}) for name in ("triton", "reference", "fla"))
    if "ms" not in ours or "ms" not in plain:
        return ""
    faster = ours["ms"] < plain["ms"]
    kind = jax.devices()[0].device_kind
    said = (
        f"triton is faster: {kind!r} belongs in MEASURED_FASTER" if faster else "triton is slower"
    )
    if "ms" in other:
        share, alone = ours["ms"] / other["ms"], ours["ms"] / other["kernel_ms"]
        said += f"; forward and backward take {share:.2f} of fla's time"
        said += f", {alone:.2f} of its kernels'"
    return f"  {said}\n"
