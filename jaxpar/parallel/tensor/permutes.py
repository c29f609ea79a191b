"""All-gather and reduce-scatter of activations as permutes, each straight to its destination.

NCCL's all-gather and reduce-scatter are kernels: they hold multiprocessors that concurrent matmuls
want, and wait until some are free. XLA can move a permute between the GPUs of one process with
their copy engines instead (`--xla_gpu_collective_permute_mode=peer`), at 380 GB/s on an H200, where
NCCL reaches 130 next to matmuls. So each collective here is n - 1 permutes of the same bytes.
A collective matmul does not need the shards concatenated: `gather_shards` returns them one by one,
so that a device can begin with its own.

A permute synchronizes all devices of the program, whoever sends; an all-to-all only those along its
axis. `all_to_all_gather` and `all_to_all_reduce_scatter` serve code that only some devices reach.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def ring_all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """All-gather: the shards of `dim` held across `axis`, concatenated.

    Args:     x: varying over every axis, `dim` of size d.
    Returns:  `dim` of size d * n.
    Communication: n - 1 permutes of x over `axis`; its transpose is `ring_reduce_scatter`.
    """
    return concatenate_shards(gather_shards(x, axis), axis, dim)


def ring_reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Reduce-scatter: the sum of x over `axis`, each device keeping its shard of `dim`.

    Args:     x: varying over every axis, `dim` of size d * n.
    Returns:  `dim` of size d, x's dtype.
    Communication: n - 1 permutes of a shard over `axis`; its transpose is `ring_all_gather`.
    """
    return reduce_shards(split_shards(x, axis, dim), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_shards(x: jax.Array, axis: str) -> tuple[jax.Array, ...]:
    """The shards held across `axis` in ring order: this device's first, then the next one's.

    Args:     x: varying over every axis.
    Communication: n - 1 permutes of x over `axis`; its transpose is `reduce_shards`.
    """
    n = lax.axis_size(axis)
    return x, *(lax.ppermute(x, axis, _ring(n, -step)) for step in range(1, n))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce_shards(parts: tuple[jax.Array, ...], axis: str) -> jax.Array:
    """The sum over `axis` of each device's contribution to this one's shard.

    Contributions travel in their own dtype and are summed in float32, in one pass.

    Args:     parts: in ring order: the contribution to this device's shard, then to the next one's.
    Returns:  as one of them.
    Communication: n - 1 permutes of a part over `axis`; its transpose is `gather_shards`.
    """
    n = lax.axis_size(axis)
    if n == 1:
        return parts[0]
    sent = [lax.ppermute(parts[step], axis, _ring(n, step)) for step in range(1, n)]
    total = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in [parts[0], *sent]))
    return total.astype(parts[0].dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def concatenate_shards(parts: tuple[jax.Array, ...], axis: str, dim: int) -> jax.Array:
    """Arrays in ring order, concatenated in the order of devices. Transpose: `split_shards`."""
    n, size = lax.axis_size(axis), parts[0].shape[dim]
    if n == 1:
        return parts[0]
    # A slice of the shards laid out twice. XLA makes one copy of it.
    round_trip = jnp.concatenate([*parts, *parts[:-1]], axis=dim)
    first = (n - lax.axis_index(axis)) % n * size
    return lax.dynamic_slice_in_dim(round_trip, first, n * size, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def split_shards(x: jax.Array, axis: str, dim: int) -> tuple[jax.Array, ...]:
    """`dim` split into one shard per device, in ring order. Transpose: `concatenate_shards`."""
    n, rank = lax.axis_size(axis), lax.axis_index(axis)
    if n == 1:
        return (x,)
    size = x.shape[dim] // n
    shard = lambda i: lax.dynamic_slice_in_dim(x, i % n * size, size, dim)  # noqa: E731
    return tuple(shard(rank + step) for step in range(n))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_to_all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """`ring_all_gather` that synchronizes only the devices along `axis`.

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
def all_to_all_reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """`ring_reduce_scatter` that synchronizes only the devices along `axis`, summed in their order.

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
    """The permutation that sends every device's value `step` places further along the ring."""
    return [(i, (i + step) % n) for i in range(n)]


def _transposed(forward: Any, backward: Any) -> None:
    """Make `backward` the transpose of `forward`, of the same axis (and dim)."""

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
