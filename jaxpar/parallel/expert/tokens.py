"""Dispatch by tokens: every device along EXPERT has all their tokens, and adds up its own experts.

The gather sends each token to every device of the axis, whichever experts it uses. So shapes are
static, and nothing can overflow on the way. Without an expert axis, both functions return their
input.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.tensor import permutes
from jaxpar.sharding.axes import EXPERT, PIPELINE


def axis_size() -> int:
    """Return the size of EXPERT: 1 outside a mesh, as in self-tests of one device."""
    in_mesh = EXPERT in jax.sharding.get_abstract_mesh().axis_names
    return lax.axis_size(EXPERT) if in_mesh else 1


def tokens_of_all(x: jax.Array) -> jax.Array:
    """Gather the tokens of all devices along EXPERT.

    Args:     x: [N, ...], varying over every axis.
    Returns:  [n N, ...]: this device's tokens first, then those of the next device, cyclically;
              with pipeline stages, in the order of devices.
    Communication: n - 1 permutes of x over EXPERT; with pipeline stages, which may run different
              branches, an all-to-all. The transpose is `sent_home`.
    """
    if axis_size() == 1:
        return x
    if _staged():
        return permutes.all_to_all_gather(x, EXPERT, 0)
    return jnp.concatenate(permutes.gather_shards(x, EXPERT))


def sent_home(partial: jax.Array) -> jax.Array:
    """Return what all devices along EXPERT computed for this device's tokens, added in float32.

    Args:     partial: [n N, ...], in the order of `tokens_of_all`.
    Returns:  [N, ...].
    Communication: n - 1 permutes of [N, ...] over EXPERT, or an all-to-all, as `tokens_of_all`.
    """
    n = axis_size()
    if n == 1:
        return partial
    if _staged():
        return permutes.all_to_all_reduce_scatter(partial, EXPERT, 0)
    return permutes.reduce_shards(tuple(jnp.split(partial, n)), EXPERT)


def ranks() -> jax.Array:
    """Return int32 [n], the positions along EXPERT of the devices, in the order of
    `tokens_of_all`."""
    n = lax.axis_size(EXPERT)
    position = jnp.arange(n, dtype=jnp.int32)
    return position if _staged() else (lax.axis_index(EXPERT) + position) % n


def _staged() -> bool:
    return lax.axis_size(PIPELINE) > 1
