"""Measure the kernels of experts: python scripts/measure/experts.py [--experts N ...] [--rows N]

The products and passes of one layer on one Hopper GPU, forward and backward but for the gradients
of matrices, in bfloat16 and in float8, at the power limit. Loads are uneven: drawn from a
log-normal distribution with a standard deviation of 0.35. Rates count rows without padding. Every
float8 result is compared with the reference's in a few tiles.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.kernels.float8 import BACKWARD, FORWARD
from jaxpar.kernels.glu import SwiGLU
from jaxpar.kernels.grouped_matmul import reference
from jaxpar.kernels.grouped_matmul.capability import HOPPER_TILE
from jaxpar.runtime.program import run_program
from scripts.measure.interleaved import Sustained, Timing, time_interleaved

#: Rows that are compared with the reference.
COMPARED = 2 * HOPPER_TILE
f32, bf16 = jnp.float32, jnp.bfloat16


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table for each number of experts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rows", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--widths", type=int, nargs=2, default=[2048, 768], metavar=("D", "F"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a timed batch")
    given = parser.parse_args(arguments)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {given.rows} rows, D and F")
    for E in given.experts:
        programs = programs_of(E, given.rows, given.tokens, *given.widths)
        held = Sustained(settle=given.seconds, timed=given.seconds)
        times = time_interleaved(programs.run, given.repeats, held)
        print(f"\n{E} experts")
        for name, found in times.items():
            error = f"error {programs.errors[name]:.1e}" if name in programs.errors else ""
            if isinstance(found, Timing):
                work = programs.flops.get(name)
                rate = f"{work / found.ms / 1e9:6.0f} TFLOP/s" if work else " " * 14
                print(f"{name:34} {1e3 * found.ms:8.0f} us {rate} {error}", flush=True)
            else:
                print(f"{name:34} {str(found)[:300]}", flush=True)


def loads_of(E: int, rows: int) -> np.ndarray:
    """Return the rows of each expert."""
    share = np.random.default_rng(0).lognormal(0, 0.35, E)
    counts = (share / share.sum() * rows).astype(np.int32)
    counts[0] += rows - counts.sum()
    return counts


@dataclass
class Programs:
    """What to time, by name, with the FLOPs of products and their errors against the reference."""

    run: dict[str, Callable[[], Any]] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, fn: Callable, *operands, work: float = 0.0, wanted: Any = None):
        """Add a program. Args: work: its FLOPs. wanted: its first rows."""
        compiled = jax.jit(fn)
        self.run[name] = functools.partial(compiled, *operands)
        if work:
            self.flops[name] = work
        if wanted is not None:
            self.errors[name] = _error(compiled(*operands), wanted)


def programs_of(E: int, rows: int, T: int, D: int, F: int) -> Programs:
    """Return the programs of a layer with E experts.

    Args:     T: tokens of which the rows are copies.
    """
    R = kernels.max_rows(rows, E, HOPPER_TILE)
    tiles = jax.jit(kernels.tiles_of, static_argnums=(1, 2))(loads_of(E, rows), R, HOPPER_TILE)
    keys = iter(jax.random.split(jax.random.key(0), 16))
    draw = jax.jit(
        lambda key, *shape: jax.random.normal(key, shape, bf16), static_argnums=(1, 2, 3)
    )
    tokens, gate, up, d_hidden = draw(next(keys), T, D), *(draw(next(keys), R, F) for _ in range(3))
    token = jax.random.randint(next(keys), (R,), 0, T, jnp.int32)
    scale = jax.random.uniform(next(keys), (R,), f32)
    to_hidden = (draw(next(keys), E, D, F) * D**-0.5).astype(bf16)
    to_output = (draw(next(keys), E, F, D) * F**-0.5).astype(bf16)
    wide, one = kernels.rows_taken(tokens, token, tiles), 2.0 * rows * D * F
    found = Programs()
    _products(found, tiles, wide, (gate, up), to_hidden, to_output, one)
    _products_in_float8(found, tiles, wide, (gate, up), to_hidden, to_output, one)
    _passes(found, tiles, tokens, token, (gate, up, d_hidden), scale, to_hidden)
    return found


def _products(found: Programs, tiles, wide, narrow, to_hidden, to_output, one: float) -> None:
    product = functools.partial(kernels.grouped_matmul, tiles=tiles)
    found.add("gate", product, wide, to_hidden, work=one)
    found.add("down", product, narrow[0], to_output, work=one)
    found.add("to hidden", functools.partial(product, transpose=True), wide, to_output, work=one)
    pair = lambda a, b, w: product((a, b), (w, w), transpose=True)  # noqa: E731
    found.add("to input", pair, *narrow, to_hidden, work=2 * one)


def _products_in_float8(found: Programs, tiles, wide, narrow, to_hidden, to_output, one) -> None:
    of_d, of_f = to_hidden.astype(FORWARD), to_output.astype(FORWARD)
    gradients = kernels.rounded(narrow, BACKWARD)
    scaled = lambda x, *w: kernels.scaled_matmul(x, w, jnp.float32(1), tiles, dtype=bf16)  # noqa: E731
    for name, operands, work in (
        ("gate", (kernels.rounded((wide,), FORWARD), jnp.swapaxes(of_d, 1, 2)), one),
        ("down", (kernels.rounded(narrow[:1], FORWARD), jnp.swapaxes(of_f, 1, 2)), one),
        ("to hidden", (kernels.rounded((wide,), BACKWARD), of_f), one),
        ("to input", (gradients, of_d, of_d), 2 * one),
    ):
        wanted = _first_rows(operands[0], operands[1:], tiles)
        found.add(f"{name}, float8", scaled, *operands, work=work, wanted=wanted)


def _passes(found: Programs, tiles, tokens, token, wide, scale, matrix) -> None:
    gate, up, _ = wide
    found.add("rows taken", kernels.rows_taken, tokens, token, tiles)
    found.add("rows taken, e4m3", kernels.rows_taken_in_float8, tokens, token, tiles)
    both = kernels.gradients_taken_in_float8
    found.add("rows taken, bf16 and e5m2", both, tokens, token, tiles)
    hidden = lambda g, u, s: (  # noqa: E731
        jax.nn.silu(g.astype(f32)) * u.astype(f32) * s[:, None]
    ).astype(bf16)
    found.add("SwiGLU by XLA", hidden, gate, up, scale)
    forward = functools.partial(kernels.glu_hidden, SwiGLU())
    found.add("SwiGLU", forward, gate, up, scale, tiles)
    found.add("SwiGLU, e4m3", kernels.swiglu_in_float8, gate, up, scale, tiles)
    backward = functools.partial(kernels.glu_backward, SwiGLU())
    found.add("SwiGLU backward", backward, *wide, scale, tiles)
    both = kernels.swiglu_backward_in_float8
    found.add("SwiGLU backward, bf16 and e5m2", both, *wide, scale, tiles)
    master = matrix.astype(f32)
    found.add("matrix to bf16", lambda w: w.astype(bf16), master)
    found.add("matrix to e4m3", lambda w: (w * 256).astype(FORWARD), master)
    found.add("matrix's largest magnitude", lambda w: jnp.max(jnp.abs(w)), master)
    turned = lambda w: jnp.swapaxes(w, 1, 2)  # noqa: E731
    found.add("e4m3 matrix, transposed", turned, matrix.astype(FORWARD))


def _first_rows(x: kernels.Float8Rows, ws: tuple, tiles: kernels.Tiles) -> np.ndarray:
    """Return the first rows of the product, by the reference."""
    n = COMPARED // HOPPER_TILE
    few = kernels.Tiles(tiles.expert[:n], tiles.starts, jnp.array([n], jnp.int32))
    rows = tuple(a[:COMPARED] for a in x.values)
    multiply = functools.partial(reference.scaled_matmul, expert_dim=0, dtype=f32)
    with jax.default_matmul_precision("highest"):
        return np.asarray(multiply(rows, ws, x.inverse[:COMPARED], few))


def _error(found: jax.Array, wanted: np.ndarray) -> float:
    found = np.asarray(found[: len(wanted)], np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


if __name__ == "__main__":
    run_program(main)
