"""Adafactor: second moments of matrices, factored into a mean of each row and of each column.

The means are vectors, so the second moment takes almost no memory. With `optimizer.beta1` 0, there
is no momentum either. Vectors have a complete second moment.

Source:   Shazeer & Stern 2018 (1804.04235), algorithm 4. The learning rate is not relative to the
          parameters' RMS, as in later uses for large models (Zhai et al. 2021, 2106.04560).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpar.config import OptimizerConfig
from jaxpar.optimizer.matrices import Matrices
from jaxpar.optimizer.widths import of_widths
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.params import ParamSpec, flat

#: Added to squares of gradients (section 6), and the RMS to which updates are clipped (6).
SQUARE_EPS, MOST_RMS = 1e-30, 1.0

#: The decay rate of step t is 1 - t**DECAY (section 7.2), at most `optimizer.beta2`.
DECAY = -0.8


class AdafactorState(NamedTuple):
    """The number of updates, the momentum of updates, and second moments of gradients.

    mu                    () without momentum.
    nu_rows, nu_columns   of matrices: means over the columns of each row, and over the rows of each
                          column, with the dims of rows or columns.
    nu                    of vectors.
    """

    count: Any
    mu: Any
    nu_rows: Any
    nu_columns: Any
    nu: Any


@dataclass(frozen=True)
class Factored:
    """The dims of a parameter: those that count matrices, then rows, then columns.

    lead, cut   first dims of rows and of columns. A vector has no columns.
    split       mesh axes over which each dim is split.
    """

    lead: int
    cut: int
    split: tuple[tuple[str, ...], ...]

    @property
    def rows(self) -> range:
        """The dims of rows."""
        return range(self.lead, self.cut)

    @property
    def columns(self) -> range:
        """The dims of columns."""
        return range(self.cut, len(self.split))

    def mean(self, x: jax.Array, dims: range) -> jax.Array:
        """Average over dims of all shards, keeping them with size 1.

        Args:     x: with the dims of the parameter.
        Communication: all-reduce of the sums over the axes that split the dims.
        """
        axes = tuple(axis for dim in dims for axis in self.split[dim])
        size = math.prod(x.shape[dim] for dim in dims) * math.prod(map(lax.axis_size, axes))
        total = jnp.sum(x, axis=tuple(dims), keepdims=True)
        return (psum(total, axes) if axes else total) / size


def cut_of(spec: ParamSpec) -> int:
    """Return the first dim of columns of a parameter: of its matrices, or of its last dim.

    Tables such as the embedding, routers and convolutions also have rows and columns here.
    """
    dims = len(spec.shape)
    if spec.columns:
        return dims - spec.columns
    return dims - 1 if spec.decay and dims - spec.lead > 1 else dims


def adafactor(
    cfg: OptimizerConfig, rate: optax.Schedule, mask: Any, matrices: Matrices
) -> optax.GradientTransformation:
    """Return the rule.

    Args:     mask: where weight decay applies.
    """
    decay = optax.add_decayed_weights(cfg.weight_decay, mask=mask)
    scaled = of_widths(scale_by_adafactor(cfg, matrices), matrices.specs)
    return optax.chain(scaled, decay, optax.scale_by_learning_rate(rate))


def scale_by_adafactor(cfg: OptimizerConfig, matrices: Matrices) -> optax.GradientTransformation:
    """Return the transformation of gradients to updates, whose RMS is at most 1."""
    specs, sharded = flat(matrices.specs), matrices.sharded
    dims_of = {name: _factored(spec, sharded=sharded) for name, spec in specs.items()}

    def init(params: Any) -> AdafactorState:
        rows, columns, nu = {}, {}, {}
        for name, p in flat(params).items():
            f = dims_of[name]
            if f.columns:
                rows[name] = jnp.zeros(p.shape[: f.cut], p.dtype)
                columns[name] = jnp.zeros(p.shape[: f.lead] + p.shape[f.cut :], p.dtype)
            else:
                nu[name] = jnp.zeros_like(p)
        momentum = jax.tree.map(jnp.zeros_like, params) if cfg.beta1 else ()
        count = jnp.zeros([], jnp.int32)
        return AdafactorState(count, momentum, *map(_tree, (rows, columns, nu)))

    def update(grads: Any, state: AdafactorState, params: Any = None):
        del params
        count = optax.safe_increment(state.count)
        beta = jnp.minimum(cfg.beta2, 1 - count.astype(jnp.float32) ** DECAY)
        rows, columns, nu = flat(state.nu_rows), flat(state.nu_columns), flat(state.nu)
        found = {}
        for name, g in flat(grads).items():
            f, square = dims_of[name], jnp.square(g) + SQUARE_EPS
            if f.columns:
                rows[name], columns[name], v = _factors(square, rows[name], columns[name], f, beta)
            else:
                nu[name] = v = beta * nu[name] + (1 - beta) * square
            step = g * lax.rsqrt(v)
            every = range(f.lead, g.ndim)
            rms = jnp.sqrt(f.mean(jnp.square(step), every))
            found[name] = step / jnp.maximum(1.0, rms / MOST_RMS)
        updates, momentum = _tree(found), state.mu
        if cfg.beta1:
            updates = momentum = optax.tree.update_moment(updates, momentum, cfg.beta1, 1)
        return updates, AdafactorState(count, momentum, *map(_tree, (rows, columns, nu)))

    return optax.GradientTransformation(init, update)


def _factors(square: jax.Array, rows: jax.Array, columns: jax.Array, f: Factored, beta: Any):
    """Average the two means of a parameter, and return them with the second moment they give."""
    of_rows, of_columns = f.mean(square, f.columns), f.mean(square, f.rows)
    of_rows = beta * rows.reshape(of_rows.shape) + (1 - beta) * of_rows
    of_columns = beta * columns.reshape(of_columns.shape) + (1 - beta) * of_columns
    v = of_rows / f.mean(of_rows, f.rows) * of_columns
    return of_rows.reshape(rows.shape), of_columns.reshape(columns.shape), v


def _factored(spec: ParamSpec, *, sharded: bool) -> Factored:
    entries = spec.partition_spec if sharded else (None,) * len(spec.shape)
    split = tuple((e,) if isinstance(e, str) else e or () for e in entries)
    return Factored(spec.lead, cut_of(spec), split)


def _tree(arrays: dict[str, Any]) -> Any:
    return flax.traverse_util.unflatten_dict(arrays, sep="/")
