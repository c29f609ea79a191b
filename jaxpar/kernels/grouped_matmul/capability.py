"""What the Hopper kernels support, and why they refuse a call."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.kernels.platform import Platform

#: Rows of a tile: those that two warpgroups multiply, and fewer for the reference, which then
#: computes less padding.
HOPPER_TILE, REFERENCE_TILE = 128, 32

#: Threads of a warpgroup.
HOPPER_WARPGROUP = 128

#: Numbers of a step through the dimension that a product in 8 bits sums over.
HOPPER_STEP_FLOAT8 = 128


@dataclass(frozen=True)
class HopperLimits:
    """The requests that a backend supports.

    compute_capability   The only NVIDIA compute capability.
    dtypes               Dtypes of rows and weights.
    width_multiple       D and F, the two widths of an expert's matrix, are multiples of it: of a
                         step through the dimension that a product sums over.
    least_width          The least D and F: the narrowest tile of the result.
    row_multiple         Widths of rows that are copied, summed, or activated are multiples of it.
    """

    compute_capability: str
    dtypes: tuple[str, ...]
    width_multiple: int
    least_width: int
    row_multiple: int


HOPPER = HopperLimits(
    compute_capability="9.0",
    dtypes=("bfloat16", "float16"),
    width_multiple=64,
    least_width=128,
    row_multiple=128,
)


def refusal(D: int, F: int, dtype, platform: Platform | None = None) -> str | None:
    """Return why the Hopper kernels cannot multiply by experts [D, F], or None if they can.

    Args:     platform: defaults to this process's platform.
    """
    here = Platform.here() if platform is None else platform
    if here.name != "gpu" or here.compute_capability != HOPPER.compute_capability:
        there = here.compute_capability or f"platform {here.name}"
        return f"it needs compute capability {HOPPER.compute_capability} (Hopper), not {there}"
    if jnp.dtype(dtype).name not in HOPPER.dtypes:
        return f"it supports {' or '.join(HOPPER.dtypes)}, not {jnp.dtype(dtype).name}"
    if any(width % HOPPER.width_multiple or width < HOPPER.least_width for width in (D, F)):
        rule = f"multiples of {HOPPER.width_multiple} from {HOPPER.least_width} on"
        return f"widths must be {rule}, and are {D} and {F}"
    return None


def refusal_of_rows(width: int, dtype, platform: Platform | None = None) -> str | None:
    """Return why the Hopper kernels cannot round rows to 8 bits, or None if they can.

    A warpgroup holds a row. Of 384 numbers, a thread would have vectors of three, which Mosaic does
    not round.
    """
    if width == HOPPER_WARPGROUP * 3:
        return f"it supports no rows of {width}"
    return refusal_in_float8(width, width, dtype, platform)


def refusal_in_float8(K: int, N: int, dtype, platform: Platform | None = None) -> str | None:
    """Return why the Hopper kernels cannot multiply rows of K by matrices [K, N] in 8 bits, or None
    if they can. A step through K has 128 numbers (`pipeline.columns_at_a_time`)."""
    if K % HOPPER_STEP_FLOAT8:
        return f"widths must be multiples of {HOPPER_STEP_FLOAT8} in float8, not {K}"
    return refusal(K, N, dtype, platform)


def moves_rows(width: int, dtype) -> bool:
    """Return whether the Hopper kernels copy and add up rows of this width."""
    return width % HOPPER.row_multiple == 0 and refusal(width, width, dtype) is None


def tile_rows(D: int, F: int, dtype, platform: Platform | None = None) -> int:
    """Return the rows of a tile for experts [D, F]."""
    return REFERENCE_TILE if refusal(D, F, dtype, platform) else HOPPER_TILE
