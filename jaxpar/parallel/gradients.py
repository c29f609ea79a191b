"""Reduction of gradients over the mesh, and their global norm."""

import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives import psum, varying_axes
from jaxpar.sharding.axes import AXES, axes_of
from jaxpar.sharding.params import ParamSpec, map_specs


@jax.named_scope("reduce_gradients")
def reduce_gradients(grads: Any, specs: Any, axes: tuple[str, ...] = AXES) -> Any:
    """Sum each local gradient over every axis along which its parameter is replicated.

    FSDP has already summed over the axes that shard the parameter. This is the only other
    reduction, once per step.

    Args:     grads: tree of float32 local shards, varying over every axis. specs: its ParamSpecs.
              axes: those to sum over at most.
    Returns:  the summed shards, invariant over the axes of the sums.
    Communication: one all-reduce per leaf over the axes missing from its PartitionSpec.
    """

    return map_specs(lambda spec, grad: psum(grad, missing_axes(spec, axes)), specs, grads)


def missing_axes(spec: ParamSpec, axes: tuple[str, ...] = AXES) -> tuple[str, ...]:
    """Return those of the mesh axes along which a parameter is replicated."""
    sharded = axes_of(spec.partition_spec)
    return tuple(axis for axis in axes if axis not in sharded)


@jax.named_scope("grad_norm")
def global_norm(tree: Any, axes: tuple[str, ...] = AXES) -> jax.Array:
    """Compute the Euclidean norm of all arrays together, counting replicated values once.

    Args:     tree: local shards, each invariant over the axes along which it is replicated.
              axes: those to sum over at most.
    Returns:  float32 scalar, the same along `axes`.
    Communication: one scalar all-reduce for each distinct set of sharded axes.
    """
    # Sum by row first, and add up rows of the same shape: reducing each array to a scalar would
    # take one kernel per array.
    rows: dict[tuple, jax.Array] = {}
    for x in jax.tree.leaves(tree):
        of_x = _squares_by_row(x)
        key = tuple(axis for axis in varying_axes(x) if axis in axes), of_x.shape
        rows[key] = rows[key] + of_x if key in rows else of_x
    sums: dict[tuple[str, ...], jax.Array] = {}
    for (over, _), squares in rows.items():
        sums[over] = sums.get(over, jnp.float32(0)) + jnp.sum(squares)
    total = [psum(s, over) if over else s for over, s in sums.items()]
    return jnp.sqrt(sum(total, jnp.float32(0)))


@jax.named_scope("clip")
def clip(grads: Any, norm: jax.Array, limit: float) -> Any:
    """Scale gradients down to the global norm `limit`. 0 disables clipping.

    Source:   Pascanu et al. 2013 (1211.5063), algorithm 1.
    """
    if limit == 0:
        return grads
    scale = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale, grads)


def _squares_by_row(x: jax.Array) -> jax.Array:
    """Sum squares over the last dims: float32 [rows], with enough rows to occupy a GPU."""
    sizes = itertools.accumulate(x.shape, operator.mul)
    rows = next((n for n in sizes if n >= 1024), 1)
    return jnp.sum(jnp.square(x.astype(jnp.float32)).reshape(rows, -1), axis=1)
