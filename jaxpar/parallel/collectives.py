"""Every collective that the model and the step may use, with its transpose in the docstring.

All of them run inside the one `shard_map`, under `check_vma=True`: the type of a value says over
which axes it varies, so a forgotten reduction is an error when the step is traced. A collective
over an axis of size 1 returns its input here, once and for all; `psum` alone always runs, because
it also changes the type.
"""

import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.axes import AXES, PIPELINE, TENSOR, axes_of
from jaxpar.parallel import direct
from jaxpar.params import map_specs

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


def largest_over(x: jax.Array, axes: Axes) -> jax.Array:
    """Elementwise maximum over `axes`. Not differentiable."""
    return x if lax.axis_size(axes) == 1 else varying(lax.pmax(x, axes))


def shift(tree: Any, axis: str, step: int) -> Any:
    """Send to the device `step` places on along `axis`, round the ring. Transpose: `-step`."""
    n = lax.axis_size(axis)
    ring = [(i, (i + step) % n) for i in range(n)]
    return tree if n == 1 else jax.tree.map(lambda x: lax.ppermute(x, axis, ring), tree)


def gather_sequence(x: jax.Array) -> jax.Array:
    """Collect the sequence shards held across TENSOR, before a column-parallel matmul.

    Args:     x: [B, T/(sequence*tensor), D], varying over every axis.
    Returns:  [B, T/sequence, D].
    Communication: `direct.gather` over TENSOR, of a stage's devices alone where there are stages,
              which may each be in a branch of their own; its transpose is `scatter_sequence`.
    Source:   Korthikanti et al. 2022 (2205.05198), section 4.2.2.
    """
    gather = direct.gather_within if lax.axis_size(PIPELINE) > 1 else direct.gather
    return gather(x, TENSOR, 1)


def scatter_sequence(x: jax.Array) -> jax.Array:
    """Add the partial results of a row-parallel matmul, keeping one sequence shard.

    Args:     x: [B, T/sequence, D], a partial sum on each rank of TENSOR.
    Returns:  [B, T/(sequence*tensor), D].
    Communication: `direct.scatter` over TENSOR, of a stage's devices alone where there are stages;
              its transpose is `gather_sequence`.
    Source:   Korthikanti et al. 2022 (2205.05198), section 4.2.2.
    """
    scatter = direct.scatter_within if lax.axis_size(PIPELINE) > 1 else direct.scatter
    return scatter(x, TENSOR, 1)


def sequence_pieces(x: jax.Array) -> tuple[jax.Array, ...]:
    """`gather_sequence` in pieces, this rank's first: what is made of it hides that others come.

    Args:     x: [B, T/(sequence*tensor), D], varying over every axis; no stages, whose devices do
              not all come to permutes.
    Returns:  as x, in the order of `direct.pieces`.
    Communication: `direct.pieces` over TENSOR; its transpose is `sum_of_sequence_pieces`.
    """
    return direct.pieces(x, TENSOR)


def sum_of_sequence_pieces(parts: tuple[jax.Array, ...]) -> jax.Array:
    """`scatter_sequence` of pieces: while one travels, another is made.

    Args:     parts: partial sums, in the order and shapes of `sequence_pieces`; or [B, T/sequence,
              D] alone.
    Returns:  [B, T/(sequence*tensor), D].
    Communication: `direct.sum_of_pieces` over TENSOR, or that of `scatter_sequence`; its transpose
              is `sequence_pieces`, or `gather_sequence`.
    """
    return scatter_sequence(parts[0]) if len(parts) == 1 else direct.sum_of_pieces(parts, TENSOR)


def sequence_in_order(parts: tuple[jax.Array, ...]) -> jax.Array:
    """What is made of `sequence_pieces`, as [B, T/sequence, ...]; a copy, if they are several. Its
    transpose is `into_sequence_pieces`."""
    return parts[0] if len(parts) == 1 else direct.in_order(parts, TENSOR, 1)


def into_sequence_pieces(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """[B, T/sequence, ...] in `count` pieces, as `sequence_pieces` has them."""
    return (x,) if count == 1 else direct.apart(x, TENSOR, 1)


def broadcast_from_last_stage(x: jax.Array) -> jax.Array:
    """The last pipeline stage's value, on every stage.

    Args:     x: any shape; read on the last stage only.
    Communication: all-reduce over PIPELINE, and again in the backward (the sum of the cotangents
              arrives on the last stage, zeros on the others).
    """
    n = lax.axis_size(PIPELINE)
    if n == 1:
        return x
    own = jnp.where(lax.axis_index(PIPELINE) == n - 1, x, 0)
    return varying(psum(own, PIPELINE))


def sum_over_stages(x: jax.Array) -> jax.Array:
    """The sum over pipeline stages, on every stage. Transpose: itself.

    Communication: all-reduce over PIPELINE, forward and backward.
    """
    return x if lax.axis_size(PIPELINE) == 1 else varying(psum(x, PIPELINE))


@jax.named_scope("reduce_gradients")
def reduce_gradients(grads: Any, specs: Any) -> Any:
    """Sum each local gradient over every axis along which its parameter is replicated.

    FSDP has already summed over the axes that shard the parameter; this is the only other
    reduction, once per step.

    Args:     grads: tree of float32 local shards, varying over every axis. specs: its ParamSpecs.
    Returns:  the same shards, invariant over the axes that were summed.
    Communication: one all-reduce per leaf over the axes missing from its PartitionSpec.
    """

    def reduce(spec, grad):
        sharded = axes_of(spec.partition_spec)
        return psum(grad, tuple(axis for axis in AXES if axis not in sharded))

    return map_specs(reduce, specs, grads)


@jax.named_scope("grad_norm")
def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm of all the arrays together, counting every replicated value once.

    Args:     tree: local shards, each invariant over the axes along which it is replicated.
    Returns:  float32 scalar, the same on every device.
    Communication: one scalar all-reduce for each distinct set of sharded axes.
    """
    # By row first, rows of the same shape added up: a scalar of each of a model's arrays would be a
    # kernel of its own.
    rows: dict[tuple, jax.Array] = {}
    for x in jax.tree.leaves(tree):
        of_x = _squares_by_row(x)
        key = varying_axes(x), of_x.shape
        rows[key] = rows[key] + of_x if key in rows else of_x
    sums: dict[tuple[str, ...], jax.Array] = {}
    for (axes, _), squares in rows.items():
        sums[axes] = sums.get(axes, jnp.float32(0)) + jnp.sum(squares)
    total = [psum(s, axes) if axes else s for axes, s in sums.items()]
    return jnp.sqrt(sum(total, jnp.float32(0)))


def _squares_by_row(x: jax.Array) -> jax.Array:
    """float32 [rows]: sums of squares over the last dims, of rows enough for all of a GPU."""
    sizes = itertools.accumulate(x.shape, operator.mul)
    rows = next((n for n in sizes if n >= 1024), 1)
    return jnp.sum(jnp.square(x.astype(jnp.float32)).reshape(rows, -1), axis=1)
