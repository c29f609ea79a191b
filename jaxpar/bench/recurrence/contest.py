"""Compares the backends of a recurrence on one shape: times, rates, errors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.bench.recurrence.shapes import RecurrenceProblem
from jaxpar.bench.timing import Timing, time_interleaved
from jaxpar.kernels import recurrence
from jaxpar.runtime.stages import stage
from jaxpar.training.selftests.recurrent import RecurrenceInputs, draw, relative

#: The backend with which the others are compared.
RIVAL = "reference"
DIRECTIONS = ("forward", "backward", "both")

#: Largest relative error of a correct result: bfloat16 gives 5e-3.
MAX_ERROR = 2e-2

#: Tokens whose results are compared: the recurrence in float32 of more needs too much memory.
EXACT_TOKENS = 1024

type Row = dict[str, Any]


class RecurrencePrograms:
    """A backend as three programs. The backward starts from what the forward kept."""

    def __init__(self, problem: RecurrenceProblem, backend: str):
        rule = getattr(recurrence, problem.rule)
        of_rule = ("rate",) if problem.rule == "delta_rule" else ()
        self.names = ("q", "k", "v", "log_decay", *of_rule, "state")

        def run(x: RecurrenceInputs, arrays):
            return rule(*arrays[:-1], x.begins, arrays[-1], problem.C, backend)

        def keeping(x: RecurrenceInputs):
            return jax.vjp(functools.partial(run, x), [getattr(x, name) for name in self.names])

        def both(x: RecurrenceInputs):
            found, pullback = keeping(x)
            return found, pullback((x.d_out, x.d_last))[0]

        def forward(x: RecurrenceInputs):
            return run(x, [getattr(x, name) for name in self.names])

        self.forward, self.both, self.keeping = jax.jit(forward), jax.jit(both), jax.jit(keeping)
        self.backward = jax.jit(lambda pullback, x: pullback((x.d_out, x.d_last))[0])

    def programs(self, x: RecurrenceInputs) -> dict[str, Callable]:
        """Return a function without arguments that launches each direction."""
        _, pullback = self.keeping(x)
        return {
            "forward": functools.partial(self.forward, x),
            "backward": functools.partial(self.backward, pullback, x),
            "both": functools.partial(self.both, x),
        }

    def results(self, x: RecurrenceInputs) -> dict[str, jax.Array]:
        """Return results and gradients by name."""
        found, gradients = self.both(x)
        names = ("out", "last", *(f"d_{name}" for name in self.names))
        return dict(zip(names, (*found, *gradients), strict=True))


def measure(
    problem: RecurrenceProblem,
    backends: Sequence[str],
    repeats: int,
    log: Callable[[str], None],
) -> list[Row]:
    """Return a row for each direction and backend: its time, or why it has none."""
    p, rows = problem, []
    timed: dict[tuple[str, str], Callable] = {}
    errors: dict[str, dict[str, float]] = {}
    x = jax.jit(lambda key: draw(key, p.B, p.T, p.G, p.H, p.shape, 0.0))(jax.random.key(0))
    for backend in backends:
        try:
            recurrence.choose(backend, p.shape)
        except ValueError as error:
            rows += [_row(p, d, backend) | {"refused": str(error)} for d in DIRECTIONS]
            continue
        log(f"{p}: {backend}")
        try:
            with stage(f"{p}: compiling {backend}"):
                errors[backend] = errors_of(p, backend)
                launches = RecurrencePrograms(p, backend).programs(x)
        except Exception as error:  # whatever a kernel or its compiler raises
            rows += [_row(p, d, backend) | {"failed": message(error)} for d in DIRECTIONS]
            continue
        timed |= {(direction, backend): launch for direction, launch in launches.items()}
    with stage(f"{p}: timing"):
        times = time_interleaved(timed, repeats)
    for (direction, backend), found in times.items():
        row = _row(p, direction, backend) | {"error": errors[backend]}
        if isinstance(found, Timing):
            row |= figures(p, direction, found.ms)
            row |= {"ms_fastest": found.fastest, "ms_slowest": found.slowest}
            rival = times.get((direction, RIVAL))
            row |= {f"times_{RIVAL}": found.ms / rival.ms} if isinstance(rival, Timing) else {}
        else:
            row["failed"] = message(found)
        if (off := wrong(errors[backend])) and "failed" not in row:
            row["failed"] = off
        rows.append(row)
    return sorted(rows, key=lambda row: DIRECTIONS.index(row["direction"]))


def figures(problem: RecurrenceProblem, direction: str, ms: float) -> Row:
    """Return a time and its rate."""
    flops = problem.flops(direction)
    return {"ms": ms, "flops": flops, "tflops": flops / ms / 1e9}


def errors_of(problem: RecurrenceProblem, backend: str) -> dict[str, float]:
    """Return the relative errors of a backend's first row, first key head and first tokens."""
    p = problem
    size = 1, min(p.T, EXACT_TOKENS), 1, p.H // p.G
    x = jax.jit(lambda key: draw(key, *size, p.shape, 1 / 200))(jax.random.key(1))
    exact = x._replace(**{name: getattr(x, name).astype(jnp.float32) for name in "qkv"})
    with jax.default_matmul_precision("highest"):  # float32, not TF32
        wanted = RecurrencePrograms(p, RIVAL).results(exact)
    found = RecurrencePrograms(p, backend).results(x)
    return {name: float(relative(found[name], wanted[name])) for name in wanted}


def wrong(errors: dict[str, float]) -> str:
    """Describe errors that are too large or NaN; empty if there are none."""
    large = [f"{name} {e:.1e}" for name, e in errors.items() if not e <= MAX_ERROR]
    return f"wrong result: relative error of {', '.join(large)}" if large else ""


def message(error: Exception) -> str:
    """Format an error in one line."""
    said = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _row(problem: RecurrenceProblem, direction: str, backend: str) -> Row:
    return {"direction": direction, "backend": backend, **problem.size}
