"""The elements of largest magnitude in every group of an array, and the others, in one pass.

A sort of every group moves each element many times. The kernel instead finds the magnitude of a
group's k-th largest element by bisection over its bits: magnitudes have the order of their bits as
integers. A group stays in the registers of a program, so memory is read and written once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpar.kernels.attention.triton.compiler import div, launch, program, rows
from jaxpar.kernels.platform import Platform, triton_missing

#: Elements of the largest group that the kernel takes, and those of a warp: 32 in each thread.
MAX_GROUP, PER_WARP = 1 << 14, 1 << 10

#: Bits of a float32 without its sign.
_MAGNITUDE = 0x7FFFFFFF


def take_largest(x: jax.Array, columns: int, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Take the k elements of largest magnitude out of every group.

    A group has `columns` neighbors of each row. A NaN is larger than all numbers. Uses a Triton
    kernel where `refusal` has no reason against it; otherwise XLA. XLA has a kernel for GPUs if k
    is at most 16 and groups have 1,024 elements or more, and sorts other groups. Of equal
    magnitudes, the first ones are taken, except by XLA's kernel.

    Args:     x: float32 [rows, groups * columns]. k: at most rows * columns.
    Returns:  (the elements, float32 [groups, k]; their places in the group, int32 [groups, k],
              row after row, in any order; x with zeros in these places).
    """
    by = by_xla if refusal(x.shape[0], columns) else by_kernel
    return by(x, columns, k)


def refusal(rows: int, columns: int) -> str | None:
    """Return why the kernel does not run for groups of a shape on this device; None if it does."""
    here = Platform.here()
    if here.name != "gpu" or float(here.compute_capability) < 8.0:
        return "it needs an NVIDIA GPU since Ampere"
    if missing := triton_missing(here):
        return missing
    if rows == 1:
        return "an array of one row is small"
    if rows * columns > MAX_GROUP:
        return f"groups have {rows * columns:,} elements, and it takes at most {MAX_GROUP:,}"
    if any(n != pl.next_power_of_2(n) for n in (rows, columns)):
        return "rows and columns must be powers of two"
    return None


def by_xla(x, columns, k):
    """`take_largest`, compiled by XLA."""
    rows, groups = x.shape[0], x.shape[1] // columns
    grouped = x.reshape(rows, groups, columns).swapaxes(0, 1).reshape(groups, -1)
    _, places = lax.top_k(jnp.abs(grouped), k)
    values = jnp.take_along_axis(grouped, places, axis=1)
    rest = grouped.at[jnp.arange(groups)[:, None], places].set(0, unique_indices=True)
    return values, places, rest.reshape(groups, rows, columns).swapaxes(0, 1).reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("columns", "k", "interpret"))
def by_kernel(x, columns, k, *, interpret=False):
    """`take_largest` as a kernel, with one program per group."""
    groups, elements = x.shape[1] // columns, x.shape[0] * columns
    values, places, rest = launch(
        functools.partial(_kernel, columns=columns, k=k),
        [x],
        [((groups, k), jnp.float32), ((groups, k), jnp.int32), (x.shape, jnp.float32)],
        programs=groups,
        warps=max(1, elements // PER_WARP),
        stages=1,
        name="take_largest",
        interpret=interpret,
    )
    return values, places, rest


def _kernel(x_ref, values_ref, places_ref, rest_ref, *, columns, k):
    group = program()
    here = rows(0, x_ref.shape[0]), rows(group * columns, columns)
    tile = x_ref[here]
    x = tile.reshape(-1)
    bits = lax.bitcast_convert_type(x, jnp.int32) & _MAGNITUDE
    lowest = _threshold(bits, k)
    larger, equal = bits > lowest, bits == lowest
    # Both counts in one scan: those of larger elements in the lower 16 bits.
    counts = jnp.cumsum(larger.astype(jnp.int32) + (equal.astype(jnp.int32) << 16))
    of_larger, of_equal = counts & 0xFFFF, counts >> 16
    num_larger = jnp.sum(larger.astype(jnp.int32))
    taken = larger | (equal & (of_equal <= k - num_larger))
    slot = jnp.where(larger, of_larger, num_larger + of_equal) - 1
    slot = jnp.where(taken, slot, k)  # what is stored outside of an array is dropped
    values_ref[group, slot] = x
    places_ref[group, slot] = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    rest_ref[here] = jnp.where(taken, 0.0, x).reshape(tile.shape)


def _threshold(bits, k):
    """Find a number with at most k of `bits` above it, and at least k not below it.

    Bisection ends early, when exactly k are not below the middle: usually after half of the 31
    bits.
    """

    def unsure(state):
        low, high, count = state
        return (low < high) & (count != k)

    def halve(state):
        low, high, count = state
        middle = high - div(high - low, 2)
        not_below = jnp.sum((bits >= middle).astype(jnp.int32))
        enough = not_below >= k
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle - 1),
            jnp.where(enough, not_below, count),
        )

    start = jnp.int32(0), jnp.max(bits), jnp.int32(bits.size)
    return lax.while_loop(unsure, halve, start)[0]
