"""Tests the kernel that finds top-k's elements on this device once, before the first step.

As with attention (`attention.py`), a wrong kernel raises no error. Groups of the run's size, with
random values, with equal ones, and with fewer nonzeros than are taken, run through the kernel and
through a stable sort. Both must take the same places, and leave the same bits.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import Config, ConfigError
from jaxpar.kernels import take_largest
from jaxpar.parallel.replicas.top_k import Groups, groups_of

#: Groups of each kind of values.
EACH = 64

PATH = "parallel.replica_reduction"

#: What the kernel computes.
NAMES = ("values", "places", "rest")

type Taken = tuple[jax.Array, jax.Array, jax.Array]


def test_top_k(
    cfg: Config, log: Callable[[str], None], kernel: Callable[..., Taken] = take_largest.by_kernel
) -> dict[str, float]:
    """Compare the kernel with a sort, if a run sums its largest gradients over replicas.

    Returns:  the error of each array: 0, since they are compared by bits; {} without the kernel.
    Raises:   ConfigError when they disagree.
    """
    groups = groups_of(2**31, cfg.parallel.replica_top_k)  # those of large arrays
    refused = take_largest.refusal(groups.rows, groups.columns)
    if refused is not None:
        log(f"elements of top_k: by XLA (not the kernel: {refused})")
        return {}
    began = time.perf_counter()
    wrong = differing(groups, cfg.train.seed, kernel)
    if wrong:
        device = jax.local_devices()[0].device_kind
        rule = f"its kernel disagrees with a sort on {device}: {', '.join(wrong)} differ"
        fix = f"use --{PATH.replace('_', '-')} int8, and report the bug"
        raise ConfigError(PATH, cfg.parallel.replica_reduction, rule, fix)
    seconds = time.perf_counter() - began
    log(f"elements of top_k: by a kernel; self-test: those of a sort, {seconds:.1f} s")
    return dict.fromkeys(NAMES, 0.0)


def differing(groups: Groups, seed: int, kernel: Callable[..., Taken]) -> list[str]:
    """Return what the kernel computes otherwise than a sort: values, places or the rest."""
    draw = jax.jit(lambda key: draw_parts(key, groups))
    parts = draw(jax.device_put(jax.random.key(seed), jax.local_devices()[0]))
    found = kernel(parts, groups.columns, groups.sent)
    wanted = jax.jit(by_sort, static_argnums=(1, 2))(parts, groups.columns, groups.sent)
    bits = lambda a: np.asarray(a).view(np.int32)  # noqa: E731
    named = zip(NAMES, _in_order(*found), wanted, strict=True)
    return [name for name, a, b in named if not np.array_equal(bits(a), bits(b))]


def draw_parts(key: jax.Array, groups: Groups) -> jax.Array:
    """Draw random values, some that are equal, and some of which fewer than are taken are nonzero.

    Returns:  float32 [rows, groups * columns].
    """
    of_values, of_few = jax.random.split(key)
    shape = groups.rows, EACH * groups.columns
    x = 1e-4 * jax.random.normal(of_values, shape)
    share = groups.sent / (2 * groups.rows * groups.columns)
    few = jnp.where(jax.random.bernoulli(of_few, share, shape), x, 0.0)
    return jnp.concatenate([x, jnp.round(1e4 * x), few], axis=1)


def by_sort(parts: jax.Array, columns: int, k: int) -> Taken:
    """`take_largest` by a stable sort, with places in order."""
    rows, groups = parts.shape[0], parts.shape[1] // columns
    grouped = parts.reshape(rows, groups, columns).swapaxes(0, 1).reshape(groups, -1)
    places = jnp.sort(jnp.argsort(-jnp.abs(grouped), axis=1, stable=True)[:, :k], axis=1)
    values = jnp.take_along_axis(grouped, places, axis=1)
    rest = grouped.at[jnp.arange(groups)[:, None], places].set(0)
    rest = rest.reshape(groups, rows, columns).swapaxes(0, 1).reshape(parts.shape)
    return values, places.astype(jnp.int32), rest


def _in_order(values: jax.Array, places: jax.Array, rest: jax.Array) -> Taken:
    order = jnp.argsort(places, axis=1)
    values, places = (jnp.take_along_axis(a, order, axis=1) for a in (values, places))
    return values, places, rest
