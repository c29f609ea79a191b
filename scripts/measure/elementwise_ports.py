"""Compare compilers of elementwise kernels: python scripts/measure/elementwise_ports.py

Each kernel that has a form for Triton and one for Mosaic GPU, and what XLA makes of its reference,
at production shapes in one process: the time, the rate of the bytes that must move, the ratio to
Triton's time, and the error. The errors are of a few rows with the same columns: for rounding the
share of bytes that differ from XLA's, otherwise the largest relative error of a number, which has
the spacing of bfloat16, up to 2^-8 = 3.9e-3 from rounding alone. `--tune` also times other sizes of
Mosaic GPU's blocks. What fails is reported, and the rest goes on.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import Config, ConfigError
from jaxpar.kernels import float8, softmax, swiglu
from jaxpar.kernels.float8 import quantize_transpose
from jaxpar.kernels.float8.amax import WithAmax
from jaxpar.kernels.hopper.quantize_transpose import DEFAULT as TILES
from jaxpar.kernels.norm import Unmaterialized, rms_norm_beside
from jaxpar.runtime import provenance
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import json_output
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.program import run_program
from jaxpar.runtime.timing import Timing, time_interleaved
from jaxpar.tools.bench.training import conditions

#: Tokens of a device, width, feed-forward width: 1.5B, and 8B over several GPUs.
SIZES = {"1.5B": (32768, 2048, 8192), "8B": (16384, 4096, 14336)}
#: Tokens and columns of a device's logits: the whole vocabulary, and an eighth of it.
LOGITS = {"1.5B": (32768, 128256), "8B, tensor 8": (16384, 16032)}
#: The most numbers that are drawn for an array.
MOST_DRAWN = 1 << 27
#: Rows of which errors are computed.
ROWS_OF_ERRORS = 256

type Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A kernel at one shape."""

    name: str
    arguments: Callable[[int], tuple]
    """From a number of rows to the arguments."""
    rows: int
    kernels: dict[str, Kernel]
    """By compiler."""
    tuned: dict[str, Kernel]
    """Mosaic GPU's with other sizes of blocks."""
    error: Callable[[Any, tuple], float]
    """From the result and the arguments."""
    in_place: bool = field(default=False)
    """The first result takes the place of the only argument."""


def normal(rows: int, columns: int, seed: int = 0) -> jax.Array:
    """Return normal values in bfloat16. The first rows are repeated: drawing takes memory, too."""
    drawn = rows
    while drawn * columns > MOST_DRAWN and drawn % 2 == 0:
        drawn //= 2
    some = jax.random.normal(jax.random.key(seed), (drawn, columns), jnp.bfloat16)
    return jnp.tile(some, (rows // drawn, 1))


def cases(shrink: int) -> Iterator[Case]:
    """Yield the cases, with rows divided by `shrink`."""
    for size, (tokens, width, wide) in SIZES.items():
        rows = tokens // shrink
        yield quantizing(f"{size}: round a norm's output", rows, width, float8.FORWARD, True)
        yield quantizing(f"{size}: round a gradient", rows, wide, float8.BACKWARD, False)
    for size, (tokens, columns) in LOGITS.items():
        rows = tokens // shrink
        given = functools.partial(lambda columns, n: (normal(n, columns),), columns)
        blocks = (1024, 2048, 4096)
        yield Case(
            f"{size}: exponentials of logits",
            given,
            rows,
            {
                "triton": in_bfloat16(softmax.exponentials_by_triton),
                "mosaic": in_bfloat16(softmax.exponentials_by_mosaic),
                "xla": in_bfloat16(softmax.exponentials_by_xla),
            },
            {f"block {n}": in_bfloat16(softmax.exponentials_by_mosaic, block=n) for n in blocks},
            error_of_exponentials,
            in_place=True,
        )
        yield Case(
            f"{size}: sums of exponentials",
            given,
            rows,
            {
                "triton": softmax.sum_by_triton,
                "mosaic": softmax.sum_by_mosaic,
                "xla": softmax.sum_by_xla,
            },
            {f"block {n}": functools.partial(softmax.sum_by_mosaic, block=n) for n in blocks},
            error_of_sums,
        )
    for size, (tokens, _, wide) in SIZES.items():
        for with_amax in (False, True):
            yield from swiglus(size, tokens // shrink, wide, with_amax)


def quantizing(name: str, rows: int, columns: int, dtype: Any, normed: bool) -> Case:
    """Return the case of rounding and transposing."""

    def given(n: int) -> tuple:
        x, gain = normal(n, columns), 1 + 0.1 * jax.random.normal(jax.random.key(1), (columns,))
        operand = rms_norm_beside(x, gain, 1e-5)[1] if normed else x
        top = operand.max_magnitude() if normed else float8.max_magnitude(operand)
        return operand, float8.power_of_two_scale(top, dtype)

    to = lambda by, **how: lambda x, scale: by(x, scale, dtype, **how)  # noqa: E731
    sizes = (
        dict(columns=64),
        dict(columns=64, buffers=3, ctas=TILES.ctas * 3 // 2),
        dict(columns=64, ctas=2 * TILES.ctas),
        dict(buffers=3, ctas=TILES.ctas // 2),
        dict(neighbors=1),
        dict(neighbors=16),
    )
    launches = {str(size): dataclasses.replace(TILES, **size) for size in sizes}
    return Case(
        name,
        given,
        rows,
        {
            "triton": to(quantize_transpose._by_triton),
            "mosaic": to(quantize_transpose._by_mosaic),
            "xla": to(quantize_transpose._by_xla),
        },
        {
            size: to(quantize_transpose._by_mosaic, launch=launch)
            for size, launch in launches.items()
        },
        functools.partial(share_of_other_bytes, dtype),
    )


def in_bfloat16(by: Kernel, **how: Any) -> Kernel:
    """Return a kernel that writes exponentials in bfloat16."""
    return functools.partial(by, dtype=jnp.bfloat16, **how)


def swiglus(size: str, rows: int, wide: int, with_amax: bool) -> Iterator[Case]:
    """Yield the cases of SwiGLU forward and backward."""

    def given(n: int) -> tuple:
        scale = None if with_amax else 0.5 + jax.random.uniform(jax.random.key(1), (n, 1))
        return normal(n, 2 * wide), scale, normal(n, wide, seed=2)

    how = dict(with_amax=True) if with_amax else {}
    forward = lambda by, **how: lambda gate_up, scale, _: by(gate_up, scale, **how)  # noqa: E731
    backward = lambda by, **how: lambda *given: by(*given, **how)  # noqa: E731
    measured = lambda by: (  # noqa: E731
        (lambda *given: swiglu._with_amax_by_xla(by(*given))) if with_amax else by
    )
    kernels = (
        ("SwiGLU", forward, swiglu.forward_by_triton, swiglu.forward_by_mosaic),
        ("SwiGLU backward", backward, swiglu.backward_by_triton, swiglu.backward_by_mosaic),
    )
    for (name, form, triton, mosaic), by_xla in zip(
        kernels, (swiglu.forward_by_xla, swiglu.backward_by_xla), strict=True
    ):
        yield Case(
            f"{size}: {name}, {'largest magnitude' if with_amax else 'scaled rows'}",
            given,
            rows,
            {
                "triton": form(triton, **how),
                "mosaic": form(mosaic, **how),
                "xla": form(measured(by_xla)),
            },
            {f"columns {n}": form(mosaic, columns=n, **how) for n in (512, 2048)},
            functools.partial(error_of_swiglu, form(by_xla)),
        )


def share_of_other_bytes(dtype: Any, found: Any, given: tuple) -> float:
    """Return the share of bytes that differ from XLA's."""
    wanted = jax.jit(quantize_transpose._by_xla, static_argnums=2)(*given, dtype)
    bits = lambda a: np.asarray(a).view(np.uint8)  # noqa: E731
    pairs = zip(found, wanted, strict=True)
    return float(np.mean([np.mean(bits(a) != bits(b)) for a, b in pairs]))


def error_of_exponentials(found: Any, given: tuple) -> float:
    """Return the largest relative error of exponentials and their sums."""
    values, base, total = (np.asarray(a, np.float64) for a in found)
    wanted = np.exp(np.asarray(given[0], np.float64) - base[:, None])
    return max(relative(values, wanted), relative(total, wanted.sum(axis=1)))


def error_of_sums(found: Any, given: tuple) -> float:
    """Return the largest relative error of the sums of exponentials."""
    base, total = (np.asarray(a, np.float64) for a in found)
    return relative(total, np.exp(np.asarray(given[0], np.float64) - base[:, None]).sum(axis=1))


def error_of_swiglu(by_xla: Kernel, found: Any, given: tuple) -> float:
    """Return the largest relative error from float32, or infinity for another largest magnitude."""
    gate_up, scale, d_y = given
    exact = jax.jit(by_xla)(gate_up.astype(jnp.float32), scale, d_y.astype(jnp.float32))
    if isinstance(found, WithAmax):
        values = np.asarray(found.values, np.float32)
        if np.abs(values).max() != np.asarray(found.amax):
            return np.inf
        found = found.values
    return relative(np.asarray(found, np.float64), np.asarray(exact, np.float64))


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest relative error of what is not nearly 0."""
    there = np.abs(wanted) > 1e-30
    return float(np.max(np.abs(found - wanted)[there] / np.abs(wanted)[there]))


def program_of(case: Case, kernel: Kernel, given: tuple) -> Callable[[], Any]:
    """Return the timed program. One that works in place takes its own results."""
    if not case.in_place:
        return functools.partial(jax.jit(kernel), *given)
    run, state = jax.jit(kernel, donate_argnums=0), [jnp.copy(given[0])]

    def program() -> Any:
        state[0], *rest = run(state[0])
        return rest

    return program


def bytes_moved(case: Case, given: tuple) -> int:
    """Return the bytes to read each argument and write each result once."""
    results = jax.eval_shape(case.kernels["xla"], *given)
    arrays = jax.tree.leaves((given[:2] if ": SwiGLU," in case.name else given, results))
    skipped = given[0].top.size * 4 if isinstance(given[0], Unmaterialized) else 0
    return sum(a.size * a.dtype.itemsize for a in arrays) - skipped


def measured(case: Case, repeats: int, tune: bool) -> list[dict[str, Any]]:
    """Print and return the rows of a case."""
    given = case.arguments(case.rows)
    kernels = case.kernels | (case.tuned if tune else {})
    programs = {name: program_of(case, kernel, given) for name, kernel in kernels.items()}
    times = time_interleaved(programs, repeats)
    size, few = bytes_moved(case, given), case.arguments(min(case.rows, ROWS_OF_ERRORS))
    del programs, given
    triton, rows = times["triton"], []
    for name, kernel in kernels.items():
        found, row = times[name], {"case": case.name, "kernel": name}
        text = f"{case.name:44}{name:44}"
        if isinstance(found, Timing):
            ratio = found.ms / triton.ms if isinstance(triton, Timing) else float("nan")
            rate = size / found.ms / 1e6
            error = error_or_reason(case, kernel, few) if name in case.kernels else "-"
            text += f"{1e3 * found.ms:9.1f} us{rate:7.0f} GB/s{ratio:8.3f}  {error}"
            row |= dataclasses.asdict(found) | {"gb_per_second": rate, "of_triton": ratio}
            row |= {"error": error}
        else:
            row["failed"] = one_line(found)
            text += f" failed: {row['failed']}"
        print(text, flush=True)
        rows.append(row)
    return rows


def error_or_reason(case: Case, kernel: Kernel, given: tuple) -> str:
    """Return the error of a kernel, or why it has none."""
    try:
        return f"{case.error(jax.jit(kernel)(*given), given):.1e}"
    except Exception as error:  # whatever a kernel or its compiler raises
        return f"failed: {one_line(error)}"


def one_line(error: Exception) -> str:
    """Return the first line of an error, short."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[
        :150
    ]


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shrink", type=int, default=1, help="divide rows by it (%(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="timed batches (%(default)s)")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="parts of names")
    parser.add_argument(
        "--seconds", type=int, default=210, help="begin no case after these (%(default)s)"
    )
    parser.add_argument("--tune", action="store_true", help="time other sizes of blocks too")
    parser.add_argument("--card", help="JSON file to which to write the figures")
    parser.add_argument("--commit", help="commit to record on the card, if there is no checkout")
    options = parser.parse_args(argv)
    for name in ("shrink", "repeats", "seconds"):
        if getattr(options, name) < 1:
            fix = f"use --{name} {parser.get_default(name)}"
            parser.error(f"--{name} = {getattr(options, name)}: must be at least 1. Fix: {fix}")
    try:
        check_file("--card", options.card)
    except ConfigError as error:
        parser.error(str(error))
    began, environment = time.monotonic(), runtime.start(Config())
    commit = options.commit or provenance.checked_out_commit()
    card: dict[str, Any] = conditions.of_this_process(environment, commit)
    card |= {"shrink": options.shrink, "rows": []}
    print(f"{card['device']}; the last column is the error, before it the ratio to Triton's time")
    for case in cases(options.shrink):
        if options.only and not any(part in case.name for part in options.only):
            continue
        if time.monotonic() - began > options.seconds:
            print(f"{case.name:44} not begun after --seconds {options.seconds}")
            continue
        try:
            card["rows"] += measured(case, options.repeats, options.tune)
        except Exception as error:  # of the arguments: out of memory, perhaps
            print(f"{case.name:44} failed: {one_line(error)}", flush=True)
            card["rows"].append({"case": case.name, "failed": one_line(error)})
    print(f"{time.monotonic() - began:.0f} s")
    if options.card:
        json_output.write("--card", options.card, card)


if __name__ == "__main__":
    run_program(main)
