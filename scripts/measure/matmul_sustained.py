"""Times matrix products at the power limit.

    python scripts/measure/matmul_sustained.py PRODUCTS [TIMES]

PRODUCTS is a JSON file of products by name (`Product.as_json`). The times, in microseconds per
round, are written to TIMES. Without TIMES, the products are compiled and run but not timed. XLA's
flags determine the kernels.

Under continuous load, a GPU reaches its power limit within about 0.1 s and lowers its clock. From
then on, a kernel's time is limited by its energy.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.kernels.float8 import max_magnitude, power_of_two_scale, quantize  # noqa: E402
from jaxpar.kernels.float8.matmul import GRADIENT_PRECISION, OUTPUT_PRECISION  # noqa: E402

ROUNDS = 2
#: Seconds of launches before timing starts, and while timing.
WARM_UP, TIMED = 0.2, 0.4


def program_of(name: str, product: dict[str, Any]) -> Callable[..., jax.Array]:
    """Return the product as a program with a name.

    Float8 operands are followed by a scale, as in `kernels/float8/matmul.py`, which XLA turns into
    one call. A product that accumulates takes and donates one more array.
    """
    dims = (tuple(product["over_left"]), tuple(product["over_right"])), ((), ())
    dtype, scaled = jnp.dtype(product["result_dtype"]), is_float8(product)
    precision = OUTPUT_PRECISION if product["fast"] else GRADIENT_PRECISION
    multiply = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=dims,
        precision=precision if scaled else None,
        preferred_element_type=dtype,
    )

    def run(left, right, *rest):
        made = multiply(left, right)
        if scaled:
            made, rest = made * (1 / rest[0]).astype(dtype), rest[1:]
        return made + rest[0] if rest else made

    run.__name__ = name
    return jax.jit(run, donate_argnums=(2 + scaled,) if product["adds"] else ())


def is_float8(product: dict[str, Any]) -> bool:
    """Return whether a product's operands are float8."""
    return product["dtype"].startswith("float8")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(dims: tuple[int, ...], dtype: str) -> jax.Array:
    """Draw normal values; for float8, scaled as for quantization."""
    if not dtype.startswith("float8"):
        return jax.random.normal(jax.random.key(len(dims)), dims, jnp.dtype(dtype))
    x = jax.random.normal(jax.random.key(len(dims)), dims, jnp.bfloat16)
    return quantize(x, power_of_two_scale(max_magnitude(x), dtype), dtype)


def _launches(program, product: dict[str, Any]) -> Callable[[int], float]:
    """Return a function that launches the product n times and returns the seconds per launch."""
    dtype = product["dtype"]
    sides = ("left", dtype), ("right", product["right_dtype"] or dtype)
    given = [_random(tuple(product[side]), dtype) for side, dtype in sides]
    given += [jnp.float32(1)] * is_float8(product)
    kept: list[jax.Array] = []
    if product["adds"]:
        kept.append(jnp.zeros(jax.eval_shape(program, *given).shape, product["result_dtype"]))

    def launch(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            made = program(*given, *kept)
            kept[:] = [made] * len(kept)
        jax.block_until_ready(made)
        return (time.perf_counter() - began) / times

    return launch


def main(argv: list[str]) -> int:
    """Run the command line."""
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
