"""What the Hopper kernels support, and why they refuse a call."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.kernels.platform import Platform

#: Rows of a tile: those that two warpgroups multiply, and fewer for the reference, which then
#: computes less padding.
HOPPER_TILE, REFERENCE_TILE = 128, 32

#: Threads of a warpgroup.
HOPPER_WARPGROUP = 128


@dataclass(frozen=True)
class HopperLimits:
    """The requests that a backend supports.

    compute_capability   The only NVIDIA compute capability.
    dtypes               Dtypes of rows and weights.
    width_multiple       D and F, the two widths of an expert's matrix, are multiples of this.
    """

    compute_capability: str
    dtypes: tuple[str, ...]
    width_multiple: int


#: A tile of rows of one operand is as wide as 128 bytes, the swizzle; one of the other is as wide
#: as two warpgroups' rows.
HOPPER = HopperLimits(compute_capability="9.0", dtypes=("bfloat16", "float16"), width_multiple=128)


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
    if D % HOPPER.width_multiple or F % HOPPER.width_multiple:
        return f"widths must be multiples of {HOPPER.width_multiple}, and are {D} and {F}"
    return None


def refusal_of_rows(width: int, dtype, platform: Platform | None = None) -> str | None:
    """Return why the Hopper kernels cannot round rows to 8 bits, or None if they can.

    A warpgroup holds a row. Of 384 numbers, a thread would have vectors of three, which Mosaic does
    not round.
    """
    if width == HOPPER_WARPGROUP * 3:
        return f"it supports no rows of {width}"
    return refusal(width, HOPPER.width_multiple, dtype, platform)


def tile_rows(D: int, F: int, dtype, platform: Platform | None = None) -> int:
    """Return the rows of a tile for experts [D, F]."""
    return REFERENCE_TILE if refusal(D, F, dtype, platform) else HOPPER_TILE
