"""Every collective that the model and the step may use, with its transpose in the docstring.

All of them run inside the one `shard_map`, under `check_vma=True`: the type of a value says over
which axes it varies, so a forgotten reduction is an error when the step is traced. A collective
over an axis of size 1 returns its input here, once and for all; `psum` alone always runs, because
it also changes the type.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.sharding.axes import AXES

type Axes = str | tuple[str, ...]


def varying_axes(x: jax.Array) -> tuple[str, ...]:
    """Mesh axes over which a value may differ between devices, read off its type.

    In the order of AXES: the type holds a set, whose order Python changes from process to process,
    and with it the compiled program.
    """
    axes = jax.typeof(x).manual_axis_type.varying
    return tuple(axis for axis in AXES if axis in axes)


def varying(tree: Any) -> Any:
    """The same values, typed as varying over every mesh axis. Moves nothing.

    Its transpose is a psum, so it belongs outside whatever is differentiated: autodiff then puts
    no hidden reduction inside a loop.
    """

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in AXES if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def over_gloo() -> bool:
    """Whether collectives run in gloo: several processes, on CPUs.

    Its sums come in another order than those within one process, and its reduce-scatter in
    jaxlib 0.11 can return wrong values (jax #40830). Sums are then taken here, in the order of the
    devices, as one process takes them: the same bits however devices are shared out.
    """
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def psum(tree: Any, axes: Axes) -> Any:
    """Sum over `axes`: the same on all of them, and typed so."""
    n = lax.axis_size(axes)
    if n < 3 or not over_gloo():  # two numbers have one sum
        return lax.psum(tree, axes)

    def ordered(x: jax.Array) -> jax.Array:
        own = jnp.arange(n, dtype=jnp.int32) == lax.axis_index(axes)
        # Adding zeros is exact. The barriers keep XLA from fusing what an all-reduce keeps apart.
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
    """`all_gather` whose transpose is the `psum_scatter` of this file."""
    return lax.all_gather(x, axes, axis=dim, tiled=True)


_gather.defvjp(
    lambda x, axes, dim: (_gather(x, axes, dim), None),
    lambda axes, dim, _, grad: (psum_scatter(grad, axes, dim),),
)


def psum_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum over `axes`, each device keeping its shard of `dim`. Transpose: `all_gather`."""
    n = lax.axis_size(axes)
    if n == 1:
        return x
    if not over_gloo():
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    pieces = jnp.stack(jnp.split(lax.optimization_barrier(x), n, axis=dim))
    traded = lax.all_to_all(pieces, axes, 0, 0, tiled=True)
    return lax.optimization_barrier(functools.reduce(jnp.add, list(traded)))


def all_to_all(x: jax.Array, axes: Axes, split_dim: int, concat_dim: int) -> jax.Array:
    """Trade a split of `concat_dim` for one of `split_dim`. Transpose: the dims swapped."""
    if lax.axis_size(axes) == 1:
        return x
    return lax.all_to_all(x, axes, split_dim, concat_dim, tiled=True)


def pmax(x: jax.Array, axes: Axes) -> jax.Array:
    """Elementwise maximum over `axes`. Not differentiable."""
    return x if lax.axis_size(axes) == 1 else varying(lax.pmax(x, axes))


def shift(tree: Any, axis: str, step: int) -> Any:
    """Send to the device `step` places on along `axis`, round the ring. Transpose: `-step`."""
    n = lax.axis_size(axis)
    ring = [(i, (i + step) % n) for i in range(n)]
    return tree if n == 1 else jax.tree.map(lambda x: lax.ppermute(x, axis, ring), tree)
