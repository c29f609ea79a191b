"""The sum over replicas of matrices of low rank (PowerSGD).

With M the gradient of a replica plus its error, and Q [columns, rank] of the step before:

    P = orthonormal(sum of M Q)        Q = sum of M^T P        the sum of M is nearly P Q^T

A matrix may be split over the other axes. Products are then summed over those that split what is
multiplied, so the result is that of the whole matrix, on every mesh.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import all_gather, psum
from jaxpar.sharding.axes import REPLICA
from jaxpar.sharding.params import ParamSpec

#: A column that shrinks below this share when its parts along earlier columns are removed, depends
#: on them: what is left is rounding error.
DEPENDENT = 1e-5

type Axes = tuple[str, ...]


class Dims(NamedTuple):
    """Where the dims of an array's matrices begin and end, and the mesh axes that split them."""

    lead: int
    cut: int
    """The first dim of columns."""
    rows: Axes
    columns: Axes


def dims_of(spec: ParamSpec) -> Dims:
    """Return the dims of a parameter's matrices. Without `columns`, the first dim is the rows."""
    lead = spec.lead
    cut = len(spec.shape) - spec.columns if spec.columns else lead + 1
    split = spec.partition_spec
    return Dims(lead, cut, _axes(split[lead:cut]), _axes(split[cut:]))


def sum_power_sgd(x: jax.Array, q: jax.Array, spec: ParamSpec) -> tuple[jax.Array, ...]:
    """Sum matrices over replicas, in low rank.

    Args:     x: float32 shard of a parameter's gradients. q: float32 [lead, columns, rank] shard,
              the same on every replica. spec: of the parameter.
    Returns:  (the sum, the same on every replica; this replica's error: x without its own part of
              the sum; the new q).
    Communication: two all-reduces over REPLICA, of float32 [rows, rank] and [columns, rank];
              between them, an all-gather over the axes of the rows, and all-reduces over those of
              rows and columns.
    Source:   Vogels et al. 2019 (1905.13727), algorithms 1 and 2.
    """
    dims = dims_of(spec)
    m = _matrices(x, dims.lead, dims.cut)
    old = q.reshape(m.shape[0], m.shape[2], q.shape[-1])
    norms = psum(jnp.sum(jnp.square(old), axis=1, keepdims=True), dims.columns)
    p = psum(psum(_product("nij,njr->nir", m, old * lax.rsqrt(norms)), dims.columns), REPLICA)
    p = _own_rows(orthonormal(all_gather(p, dims.rows, dim=1)), dims.rows, p.shape[1])
    own = psum(_product("nij,nir->njr", m, p), dims.rows)
    new = psum(own, REPLICA)
    total = _product("nir,njr->nij", p, new)
    left = m - _product("nir,njr->nij", p, own)
    found = psum(jnp.sum(jnp.square(new), axis=1, keepdims=True), dims.columns)
    # A direction in which nothing was found, such as that of an idle expert, is tried again.
    new = jnp.where(found > 0, new, old)
    return total.reshape(x.shape), left.reshape(x.shape), new.reshape(q.shape)


def orthonormal(p: jax.Array) -> jax.Array:
    """Make the columns of float32 [n, rows, rank] orthonormal, or zero where they are dependent.

    Source:   modified Gram-Schmidt, twice: Giraud et al. 2005, "The loss of orthogonality in the
              Gram-Schmidt orthogonalization process".
    """
    done: list[jax.Array] = []
    for i in range(p.shape[-1]):
        v = p[..., i]
        before = _norm(v)
        for u in done * 2:
            v = v - jnp.sum(u * v, axis=-1, keepdims=True) * u
        norm = _norm(v)
        independent = norm > DEPENDENT * before
        # NaN compares false, and has to remain.
        v = jnp.where(independent | jnp.isnan(norm), v / jnp.where(norm == 0, 1, norm), 0)
        done.append(v)
    return jnp.stack(done, axis=-1)


def _norm(v: jax.Array) -> jax.Array:
    """Norm along the last dim. Scaled, because squares of small gradients would underflow."""
    largest = jnp.max(jnp.abs(v), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt(jnp.sum(jnp.square(v / scale), axis=-1, keepdims=True))


def _matrices(x: jax.Array, lead: int, cut: int) -> jax.Array:
    """Reshape to [n, rows, columns]."""
    return x.reshape(
        [math.prod(dims) for dims in (x.shape[:lead], x.shape[lead:cut], x.shape[cut:])]
    )


def _product(formula: str, *arrays: jax.Array) -> jax.Array:
    """Multiply in full float32. In fewer bits, sum and errors would not add up."""
    return jnp.einsum(formula, *arrays, precision=lax.Precision.HIGHEST)


def _own_rows(p: jax.Array, axes: Axes, rows: int) -> jax.Array:
    """Return this device's rows of a whole matrix."""
    if not axes or lax.axis_size(axes) == 1:
        return p
    return lax.dynamic_slice_in_dim(p, lax.axis_index(axes) * rows, rows, axis=1)


def _axes(dims: Any) -> Axes:
    """Return the axes in part of a PartitionSpec."""
    return tuple(axis for dim in dims for axis in ((dim,) if isinstance(dim, str) else dim or ()))
