"""The collectives that the model and the step use. Docstrings name the transpose of each.

All of them run inside one `shard_map` with `check_vma=True`: the type of a value includes the axes
over which it varies, so a missing reduction is an error when the step is traced. A collective over
an axis of size 1 returns its input. Only `psum` always runs, because it also changes the type.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.sharding.axes import AXES, PIPELINE

type Axes = str | tuple[str, ...]


def varying_axes(x: jax.Array) -> tuple[str, ...]:
    """Return the mesh axes over which a value may differ between devices, according to its type.

    Axes are in the order of AXES. The type holds a set, whose order differs between processes; that
    order would make the compiled programs differ too.
    """
    axes = jax.typeof(x).manual_axis_type.varying
    return tuple(axis for axis in AXES if axis in axes)


def varying(tree: Any) -> Any:
    """Cast values to the type that varies over every mesh axis. Moves no data.

    The transpose is a psum, so call this outside the differentiated function; otherwise autodiff
    would add hidden reductions inside loops.
    """

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in AXES if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def over_gloo() -> bool:
    """Return whether collectives use gloo, which several processes on CPUs do.

    Gloo sums in a different order than a single process, and its reduce-scatter in jaxlib 0.11 can
    return wrong values (jax #40830). The collectives of this module then sum in the order of the
    devices, as a single process does, so results are equal bit for bit for any number of processes.
    """
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def psum(tree: Any, axes: Axes) -> Any:
    """Sum over `axes`. The result's type is invariant over them."""
    n = lax.axis_size(axes)
    if n < 3 or not over_gloo():  # the order of two terms does not matter
        return lax.psum(tree, axes)

    def ordered(x: jax.Array) -> jax.Array:
        own = jnp.arange(n, dtype=jnp.int32) == lax.axis_index(axes)
        # Adding zeros is exact. The barriers prevent fusions that an all-reduce would not allow.
        x = lax.optimization_barrier(x)
        pieces = lax.psum(jnp.where(own.reshape(n, *[1] * x.ndim), x, jnp.zeros_like(x)), axes)
        return lax.optimization_barrier(functools.reduce(jnp.add, list(pieces)))

    return jax.tree.map(ordered, tree)


def all_gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Concatenate the shards of `dim` held across `axes`. Transpose: `psum_scatter`."""
    if lax.axis_size(axes) == 1:
        return x
    return _gather(x, axes, dim) if over_gloo() else lax.all_gather(x, axes, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """`all_gather` with the `psum_scatter` of this module as its transpose."""
    return lax.all_gather(x, axes, axis=dim, tiled=True)


_gather.defvjp(
    lambda x, axes, dim: (_gather(x, axes, dim), None),
    lambda axes, dim, _, grad: (psum_scatter(grad, axes, dim),),
)


def all_gather_invariant(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Do the same. The result's type is invariant over `axes`. Not differentiable."""
    if not set(varying_axes(x)) & set(axes):  # axes of size 1: `share` did not cut x
        return x
    return lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying")


def share(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Return this device's part of `dim`, of arrays that are equal along `axes`. Moves no data."""
    n = lax.axis_size(axes)
    if n == 1:
        return x
    size = x.shape[dim] // n
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


def psum_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum over `axes` and return this device's shard of `dim`. Transpose: `all_gather`."""
    n = lax.axis_size(axes)
    if n == 1:
        return x
    if not over_gloo():
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    pieces = jnp.stack(jnp.split(lax.optimization_barrier(x), n, axis=dim))
    traded = lax.all_to_all(pieces, axes, 0, 0, tiled=True)
    return lax.optimization_barrier(functools.reduce(jnp.add, list(traded)))


def all_to_all(x: jax.Array, axes: Axes, split_dim: int, concat_dim: int) -> jax.Array:
    """Reshard over `axes` from `concat_dim` to `split_dim`. Transpose: the dims swapped."""
    if lax.axis_size(axes) == 1:
        return x
    return lax.all_to_all(x, axes, split_dim, concat_dim, tiled=True)


def pmax(x: jax.Array, axes: Axes) -> jax.Array:
    """Compute the elementwise maximum over `axes`. Not differentiable."""
    return x if lax.axis_size(axes) == 1 else varying(lax.pmax(x, axes))


def shift(tree: Any, axis: str, step: int) -> Any:
    """Send to the device `step` places further along `axis`, cyclically. Transpose: `-step`."""
    n = lax.axis_size(axis)
    ring = [(i, (i + step) % n) for i in range(n)]
    return tree if n == 1 else jax.tree.map(lambda x: lax.ppermute(x, axis, ring), tree)


def broadcast_from_last_stage(x: jax.Array) -> jax.Array:
    """Broadcast the last pipeline stage's value to every stage.

    Args:     x: any shape; read on the last stage only.
    Communication: all-reduce over PIPELINE, and again in the backward, where the last stage
              receives the sum of the cotangents and the others zeros.
    """
    n = lax.axis_size(PIPELINE)
    if n == 1:
        return x
    own = jnp.where(lax.axis_index(PIPELINE) == n - 1, x, 0)
    return varying(psum(own, PIPELINE))


def sum_over_stages(x: jax.Array) -> jax.Array:
    """Sum over pipeline stages, with the result on every stage. Transpose: itself.

    Communication: all-reduce over PIPELINE, forward and backward.
    """
    return x if lax.axis_size(PIPELINE) == 1 else varying(psum(x, PIPELINE))
