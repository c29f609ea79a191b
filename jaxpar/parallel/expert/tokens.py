"""Dispatch by tokens: every device of a group has all their tokens, and adds up its own experts.

The gather sends each token to every device of the group, whichever experts it uses. So shapes are
static, and nothing can overflow on the way. A group of one sends nothing.

A group is the devices along EXPERT, or along EXPERT and TENSOR if experts are spread over both.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ParallelConfig
from jaxpar.config.layout.placement import spreads_experts
from jaxpar.kernels.grouped_matmul import Parts
from jaxpar.parallel.collectives import Axes
from jaxpar.parallel.tensor import permutes
from jaxpar.sharding.axes import EXPERT, PIPELINE, SPREAD_EXPERT_AXES


def group_axes(p: ParallelConfig) -> tuple[str, ...]:
    """Return the mesh axes over which experts are divided."""
    return SPREAD_EXPERT_AXES if spreads_experts(p) else (EXPERT,)


def group_size(axes: Axes) -> int:
    """Return the devices of a group: 1 outside a mesh, as in self-tests of one device."""
    in_mesh = EXPERT in jax.sharding.get_abstract_mesh().axis_names
    return lax.axis_size(axes) if in_mesh else 1


def tokens_of_all(x: jax.Array, axes: Axes) -> jax.Array:
    """Gather the tokens of all devices of a group into one array, [n N, ...], as `parts_of_all`."""
    parts = parts_of_all(x, axes)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def parts_of_all(x: jax.Array, axes: Axes) -> Parts:
    """Gather the tokens of all devices of a group, without a copy into one array.

    Args:     x: [N, ...], varying over every axis.
    Returns:  n arrays [N, ...]: this device's tokens, then those of the next device, cyclically.
              With pipeline stages one array [n N, ...], in the order of devices.
    Communication: n - 1 permutes of x over `axes`; with pipeline stages, which may run different
              branches, an all-to-all. The transpose is `sent_home`.
    """
    if group_size(axes) == 1:
        return (x,)
    if _staged():
        return (permutes.all_to_all_gather(x, axes, 0),)
    return permutes.gather_shards(x, axes)


def num_parts(axes: Axes) -> int:
    """Return how many arrays `parts_of_all` returns."""
    n = group_size(axes)
    return 1 if n == 1 or _staged() else n


def sent_home(partial: Parts, axes: Axes) -> jax.Array:
    """Return what all devices of a group computed for this device's tokens, added in float32.

    Args:     partial: as `parts_of_all` returns it.
    Returns:  [N, ...].
    Communication: n - 1 permutes of [N, ...] over `axes`, or an all-to-all, as `parts_of_all`.
    """
    if group_size(axes) == 1:
        return partial[0]
    if _staged():
        return permutes.all_to_all_reduce_scatter(partial[0], axes, 0)
    return permutes.reduce_shards(partial, axes)


def ranks(axes: Axes) -> jax.Array:
    """Return int32 [n], the positions in the group of the devices, in the order of
    `tokens_of_all`."""
    n = lax.axis_size(axes)
    position = jnp.arange(n, dtype=jnp.int32)
    return position if _staged() else (lax.axis_index(axes) + position) % n


def _staged() -> bool:
    return lax.axis_size(PIPELINE) > 1
