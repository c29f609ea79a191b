"""python -m jaxpar.bench.sustained PRODUCTS TIMES: matrix products alone, at the power limit.

PRODUCTS is a JSON of products by name (`products.Product.as_json`), TIMES the file for their times:
microseconds, one for each round. Without TIMES they are compiled and run, and not timed. Which
kernels they take is XLA's flags' affair.

A GPU that multiplies without a pause comes to its power limit within some 0.1 s and lowers its
clock; from then on a kernel takes as long as its energy does.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROUNDS = 2
#: Seconds of launches before the clock starts, and while it runs.
WARM_UP, TIMED = 0.2, 0.4


def program_of(name: str, product: dict[str, Any]) -> Callable[..., jax.Array]:
    """The product as a program of that name; one that adds takes, and gives away, a third array."""
    dims = (tuple(product["over_left"]), tuple(product["over_right"])), ((), ())
    dtype = jnp.dtype(product["result_dtype"])

    def run(left, right, *base):
        made = jax.lax.dot_general(left, right, dims, preferred_element_type=dtype)
        return made + base[0] if base else made

    run.__name__ = name
    return jax.jit(run, donate_argnums=(2,) if product["adds"] else ())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(dims: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(len(dims)), dims, jnp.dtype(dtype))


def _launches(program, product: dict[str, Any]) -> Callable[[int], float]:
    """A function that launches the product so often, and returns the seconds of one."""
    dtype = product["dtype"]
    left, right = (_random(tuple(product[side]), dtype) for side in ("left", "right"))
    kept: list[jax.Array] = []
    if product["adds"]:
        kept.append(jnp.zeros(jax.eval_shape(program, left, right).shape, product["result_dtype"]))

    def launch(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            made = program(left, right, *kept)
            kept[:] = [made] * len(kept)
        jax.block_until_ready(made)
        return (time.perf_counter() - began) / times

    return launch


def main(argv: list[str]) -> int:
    """The command line."""
    products = json.loads(Path(argv[0]).read_text())
    programs = {name: program_of(name, product) for name, product in products.items()}
    times: dict[str, list[float]] = {name: [] for name in products}
    for _ in range(ROUNDS if argv[1:] else 1):
        for name, product in products.items():
            launch = _launches(programs[name], product)
            launch(1)
            if not argv[1:]:
                continue
            once = launch(3)
            launch(max(2, round(WARM_UP / once)))
            times[name].append(launch(max(3, round(TIMED / once))) * 1e6)
    if argv[1:]:
        Path(argv[1]).write_text(json.dumps(times))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
