"""Gather and scatter of activations piece by piece, each sent straight to where it is needed.

An all-gather or reduce-scatter of NCCL is a kernel: it holds multiprocessors that the matmuls
beside it want, and waits for some to be free. XLA can move a permute between the GPUs of one
process with their copy engines instead (`--xla_gpu_collective_permute_mode=peer`), at 380 GB/s on
an H200 where NCCL, beside matmuls, gives 130. So these are n - 1 permutes, of the same bytes.
Matmuls need no shards side by side: `pieces` leaves them apart, so a device begins with its own.

XLA has all devices of the program come to a permute, whoever sends; to an all-to-all only those
along its axis. The forms `_within` are one all-to-all, for what only some devices come to.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The shards of `dim` held across `axis`, in order.

    Args:     x: varying over every axis, `dim` of size d.
    Returns:  `dim` of size d * n.
    Communication: n - 1 permutes of x over `axis`; its transpose is `scatter`.
    """
    return in_order(pieces(x, axis), axis, dim)


def scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The sum of x over `axis`, each device keeping its shard of `dim`.

    Args:     x: varying over every axis, `dim` of size d * n.
    Returns:  `dim` of size d, x's dtype.
    Communication: n - 1 permutes of a shard over `axis`; its transpose is `gather`.
    """
    return sum_of_pieces(apart(x, axis, dim), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def pieces(x: jax.Array, axis: str) -> tuple[jax.Array, ...]:
    """The shards held across `axis`: this device's, then those of the next ones round the ring.

    Args:     x: varying over every axis.
    Communication: n - 1 permutes of x over `axis`; its transpose is `sum_of_pieces`.
    """
    n = lax.axis_size(axis)
    return x, *(lax.ppermute(x, axis, _sends(n, -step)) for step in range(1, n))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_of_pieces(parts: tuple[jax.Array, ...], axis: str) -> jax.Array:
    """The sum over `axis` of what each device has made for this one.

    They travel in their dtype and are added up in float32, in one pass.

    Args:     parts: in the order of `pieces`: for this device, then for the next ones.
    Returns:  as one of them.
    Communication: n - 1 permutes of a part over `axis`; its transpose is `pieces`.
    """
    n = lax.axis_size(axis)
    if n == 1:
        return parts[0]
    sent = [lax.ppermute(parts[step], axis, _sends(n, step)) for step in range(1, n)]
    total = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in [parts[0], *sent]))
    return total.astype(parts[0].dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def in_order(parts: tuple[jax.Array, ...], axis: str, dim: int) -> jax.Array:
    """Arrays in the order of `pieces`, side by side in that of the devices. Transpose: `apart`."""
    n, size = lax.axis_size(axis), parts[0].shape[dim]
    if n == 1:
        return parts[0]
    # A slice of the pieces laid out twice. XLA makes one copy of it.
    round_trip = jnp.concatenate([*parts, *parts[:-1]], axis=dim)
    first = (n - lax.axis_index(axis)) % n * size
    return lax.dynamic_slice_in_dim(round_trip, first, n * size, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def apart(x: jax.Array, axis: str, dim: int) -> tuple[jax.Array, ...]:
    """`dim` cut for the devices, in the order of `pieces`. Its transpose is `in_order`."""
    n, own = lax.axis_size(axis), lax.axis_index(axis)
    if n == 1:
        return (x,)
    size = x.shape[dim] // n
    piece = lambda i: lax.dynamic_slice_in_dim(x, i % n * size, size, dim)  # noqa: E731
    return tuple(piece(own + step) for step in range(n))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_within(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """`gather`, to which only the devices along `axis` need come.

    Communication: an all-to-all over `axis` in which everybody is sent x; its transpose is
              `scatter_within`.
    """
    n = lax.axis_size(axis)
    if n == 1:
        return x
    pieces = lax.all_to_all(jnp.broadcast_to(x, (n, *x.shape)), axis, 0, 0, tiled=True)
    whole = (*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
    return jnp.moveaxis(pieces, 0, dim).reshape(whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter_within(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """`scatter`, to which only the devices along `axis` need come. Added up in their order.

    Communication: an all-to-all of x over `axis`; its transpose is `gather_within`.
    """
    n = lax.axis_size(axis)
    if n == 1:
        return x
    pieces = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    traded = lax.all_to_all(jnp.moveaxis(pieces, dim, 0), axis, 0, 0, tiled=True)
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in traded)).astype(x.dtype)


def _sends(n: int, step: int) -> list[tuple[int, int]]:
    """Everybody to the device `step` places on, round the ring."""
    return [(i, (i + step) % n) for i in range(n)]


def _transposed(forward: Any, backward: Any) -> None:
    """Make `backward` the transpose of `forward`, of the same axis (and dim)."""

    def transpose(*arguments: Any) -> tuple[Any]:
        *where, _, g = arguments
        return (backward(g, *where),)

    forward.defvjp(lambda x, *where: (forward(x, *where), None), transpose)


for _forward, _backward in (
    (pieces, sum_of_pieces),
    (in_order, apart),
    (gather_within, scatter_within),
):
    _transposed(_forward, _backward)
    _transposed(_backward, _forward)
