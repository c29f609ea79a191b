"""All-gather and reduce-scatter of activations by permutes that send directly to their targets.

NCCL's all-gather and reduce-scatter are kernels: they occupy multiprocessors that concurrent
matmuls need, and wait until some are free. Between the GPUs of one process, XLA can run a permute
on copy engines instead (`--xla_gpu_collective_permute_mode=peer`). On an H200 these reach 380 GB/s,
while NCCL reaches 130 next to matmuls. Each collective here consists of n - 1 permutes, one to each
other device, and moves the same number of bytes. A collective matmul does not need the shards
concatenated: `gather_shards` returns them separately, so a device can start with its own shard.

A permute synchronizes all devices of the program, whichever devices send. An all-to-all
synchronizes only those along its axis. `all_to_all_gather` and `all_to_all_reduce_scatter` are for
code that only some devices reach.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import Axes


def permute_all_gather(x: jax.Array, axis: Axes, dim: int) -> jax.Array:
    """All-gather by direct permutes: concatenate the shards of `dim` held across `axis`.

    Args:     x: varying over every axis, `dim` of size d.
    Returns:  `dim` of size d * n.
    Communication: n - 1 permutes of x over `axis`; its transpose is `permute_reduce_scatter`.
    """
    return concatenate_shards(gather_shards(x, axis), axis, dim)


def permute_reduce_scatter(x: jax.Array, axis: Axes, dim: int) -> jax.Array:
    """Reduce-scatter by direct permutes: sum x over `axis` and keep this device's shard of `dim`.

    Args:     x: varying over every axis, `dim` of size d * n.
    Returns:  `dim` of size d, x's dtype.
    Communication: n - 1 permutes of a shard over `axis`; its transpose is `permute_all_gather`.
    """
    return reduce_shards(split_shards(x, axis, dim), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_shards(x: jax.Array, axis: Axes) -> tuple[jax.Array, ...]:
    """Gather the shards held across `axis` as separate arrays.

    Args:     x: varying over every axis.
    Returns:  the shards in cyclic order of devices, starting with this device's.
    Communication: n - 1 permutes of x over `axis`; its transpose is `reduce_shards`.
    """
    n = lax.axis_size(axis)
    return x, *(lax.ppermute(x, axis, _ring(n, -step)) for step in range(1, n))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce_shards(parts: tuple[jax.Array, ...], axis: Axes) -> jax.Array:
    """Sum the contributions of all devices along `axis` to this device's shard.

    Contributions are sent in their own dtype and summed in float32, in one pass.

    Args:     parts: contributions to each device's shard, in cyclic order, this device's first.
    Returns:  an array of the shape and dtype of one part.
    Communication: n - 1 permutes of a part over `axis`; its transpose is `gather_shards`.
    """
    n = lax.axis_size(axis)
    if n == 1:
        return parts[0]
    sent = [lax.ppermute(parts[step], axis, _ring(n, step)) for step in range(1, n)]
    total = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in [parts[0], *sent]))
    return total.astype(parts[0].dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def concatenate_shards(parts: tuple[jax.Array, ...], axis: Axes, dim: int) -> jax.Array:
    """Concatenate arrays in the order of devices. Transpose: `split_shards`.

    Args:     parts: one array per device, in cyclic order, starting with this device's.
    """
    n, size = lax.axis_size(axis), parts[0].shape[dim]
    if n == 1:
        return parts[0]
    # Slice the shards out of two consecutive copies. XLA makes a single copy of this.
    round_trip = jnp.concatenate([*parts, *parts[:-1]], axis=dim)
    first = (n - lax.axis_index(axis)) % n * size
    return lax.dynamic_slice_in_dim(round_trip, first, n * size, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def split_shards(x: jax.Array, axis: Axes, dim: int) -> tuple[jax.Array, ...]:
    """Split `dim` into one shard per device. Transpose: `concatenate_shards`.

    Returns:  the shards in cyclic order of devices, starting with this device's.
    """
    n, rank = lax.axis_size(axis), lax.axis_index(axis)
    if n == 1:
        return (x,)
    size = x.shape[dim] // n
    shard = lambda i: lax.dynamic_slice_in_dim(x, i % n * size, size, dim)  # noqa: E731
    return tuple(shard(rank + step) for step in range(n))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_to_all_gather(x: jax.Array, axis: Axes, dim: int) -> jax.Array:
    """All-gather that synchronizes only the devices along `axis`.

    Communication: an all-to-all over `axis` that sends x to every device; its transpose is
              `all_to_all_reduce_scatter`.
    """
    n = lax.axis_size(axis)
    if n == 1:
        return x
    shards = lax.all_to_all(jnp.broadcast_to(x, (n, *x.shape)), axis, 0, 0, tiled=True)
    whole = (*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
    return jnp.moveaxis(shards, 0, dim).reshape(whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_to_all_reduce_scatter(x: jax.Array, axis: Axes, dim: int) -> jax.Array:
    """Reduce-scatter that synchronizes only the devices along `axis` and sums in their order.

    Communication: an all-to-all of x over `axis`; its transpose is `all_to_all_gather`.
    """
    n = lax.axis_size(axis)
    if n == 1:
        return x
    shards = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    received = lax.all_to_all(jnp.moveaxis(shards, dim, 0), axis, 0, 0, tiled=True)
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in received)).astype(
        x.dtype
    )


def _ring(n: int, step: int) -> list[tuple[int, int]]:
    """Return the permutation that sends each device's value directly to device i + step mod n."""
    return [(i, (i + step) % n) for i in range(n)]


def _transposed(forward: Any, backward: Any) -> None:
    """Make `backward` the transpose of `forward`, with the same axis (and dim)."""

    def transpose(*arguments: Any) -> tuple[Any]:
        *where, _, g = arguments
        return (backward(g, *where),)

    forward.defvjp(lambda x, *where: (forward(x, *where), None), transpose)


for _forward, _backward in (
    (gather_shards, reduce_shards),
    (concatenate_shards, split_shards),
    (all_to_all_gather, all_to_all_reduce_scatter),
):
    _transposed(_forward, _backward)
    _transposed(_backward, _forward)
