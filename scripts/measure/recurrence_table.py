"""Decide MEASURED_FASTER for this GPU: python scripts/measure/recurrence_table.py

Times forward and backward of the Triton kernels of Gated DeltaNet and Mamba-2, and of the
reference, at the sizes of Qwen3-Next and Nemotron-H. `auto` takes the kernels on the GPUs that
`jaxpar/kernels/recurrence/capability.py` lists. Results are compared with the recurrence in
float32, over the first 1,024 tokens of a key head. Ends with code 1 if one is wrong.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.kernels import recurrence  # noqa: E402
from jaxpar.runtime import exit_codes  # noqa: E402
from jaxpar.training.selftests.recurrent import RecurrenceInputs, draw, relative  # noqa: E402
from scripts.measure.interleaved import Timing, time_interleaved  # noqa: E402

#: Largest relative error of a correct result: bfloat16 gives 5e-3.
MAX_ERROR = 2e-2
#: Tokens whose results are compared: the recurrence in float32 of more needs too much memory.
EXACT_TOKENS = 1024
REPEATS = 15


@dataclasses.dataclass(frozen=True)
class Problem:
    """H heads that share the queries and keys of G, with states [K, V], in chunks of C tokens."""

    rule: str
    B: int
    T: int
    G: int
    H: int
    K: int
    V: int
    C: int = 64
    dtype: str = "bfloat16"

    @property
    def shape(self) -> recurrence.Shape:
        """What a backend must support."""
        return recurrence.Shape(self.C, self.K, self.V, self.dtype)


PROBLEMS = (
    Problem("delta_rule", 1, 8192, 16, 32, 128, 128),
    Problem("delta_rule", 4, 8192, 16, 32, 128, 128),
    Problem("state_space", 1, 8192, 8, 128, 128, 64),
)


def program_of(problem: Problem, backend: str) -> Callable[[RecurrenceInputs], dict]:
    """Return a program that computes results and gradients by name."""
    rule = getattr(recurrence, problem.rule)
    of_rule = ("rate",) if problem.rule == "delta_rule" else ()
    names = ("q", "k", "v", "log_decay", *of_rule, "state")

    def run(x: RecurrenceInputs) -> dict[str, jax.Array]:
        forward = lambda a: rule(*a[:-1], x.begins, a[-1], problem.C, backend)  # noqa: E731
        found, pullback = jax.vjp(forward, [getattr(x, name) for name in names])
        gradients = pullback((x.d_out, x.d_last))[0]
        results = ("out", "last", *(f"d_{name}" for name in names))
        return dict(zip(results, (*found, *gradients), strict=True))

    return jax.jit(run)


def errors_of(problem: Problem, backend: str) -> dict[str, float]:
    """Return the relative errors of a backend's first row, first key head and first tokens."""
    p = problem
    size = 1, min(p.T, EXACT_TOKENS), 1, p.H // p.G
    x = jax.jit(lambda key: draw(key, *size, p.shape, 1 / 200))(jax.random.key(1))
    exact = x._replace(**{name: getattr(x, name).astype(jnp.float32) for name in "qkv"})
    with jax.default_matmul_precision("highest"):  # float32, not TF32
        wanted = program_of(p, "reference")(exact)
    found = program_of(p, backend)(x)
    return {name: float(relative(found[name], wanted[name])) for name in wanted}


def measure(problem: Problem, backends: tuple[str, ...]) -> dict[str, Timing | Exception]:
    """Time forward with backward of each backend, interleaved."""
    p = problem
    x = jax.jit(lambda key: draw(key, p.B, p.T, p.G, p.H, p.shape, 0.0))(jax.random.key(0))
    programs = {name: functools.partial(program_of(p, name), x) for name in backends}
    return time_interleaved(programs, REPEATS)


def main() -> int:
    """Measure each problem, print the decision, and return the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    kind = jax.devices()[0].device_kind
    if why := recurrence.refusal(PROBLEMS[0].shape):
        raise SystemExit(f"nothing to measure on {kind}: the Triton backend: {why}")
    faster, wrong = [], False
    for problem in PROBLEMS:
        found = measure(problem, ("triton", "reference"))
        for name, time in found.items():
            if isinstance(time, Exception):
                raise time
            error = max(errors_of(problem, name).values())
            wrong |= not error <= MAX_ERROR
            print(f"{problem}: {name} {time.ms:.3f} ms, relative error {error:.1e}", flush=True)
        times = {name: time.ms for name, time in found.items() if isinstance(time, Timing)}
        faster.append(times["triton"] < times["reference"])
    belongs = "belongs" if all(faster) and not wrong else "does not belong"
    print(f"{kind!r} {belongs} in MEASURED_FASTER")
    return exit_codes.EXIT_ERROR if wrong else exit_codes.EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
