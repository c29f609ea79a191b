"""A train step on its way, as features get it."""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.config.metrics import Reduction
from jaxpar.execution.decisions import Execution
from jaxpar.model.parameters import trainable_specs
from jaxpar.model.probes import Probed, num_before
from jaxpar.parallel.collectives import psum, varying, varying_axes
from jaxpar.sharding.axes import AXES, PIPELINE
from jaxpar.sharding.batch import Batch
from jaxpar.step.layer_order import EMPTY, layers_here, rows_here

if TYPE_CHECKING:
    from jaxpar.step.feature import Feature

type Tree = Any


@dataclass(frozen=True)
class TrainStep:
    """A train step on its way, inside the `shard_map`: local shards."""

    ex: Execution
    step: Any
    """int32 scalar, steps before this one; None in a gradient step."""
    params: Tree
    """All parameters before the update."""
    batch: Batch
    extra: dict[str, Any] = field(default_factory=dict)
    """State of features by name; {} in a gradient step."""
    requested: tuple[str, ...] = ()
    """Names of larger results that a caller wants, such as "routing"."""
    scale: Any = 1.0
    """Factor of the loss in its backward."""
    fed: Tree = field(default_factory=dict)
    """What layers read in addition, {"top", "layers"}."""
    grads: Tree = None
    """Of the trainable parameters, float32, summed over the mesh."""
    probes: dict[str, Probed] = field(default_factory=dict)
    """What layers have measured on this device, by probe."""
    results: dict[str, Any] = field(default_factory=dict)
    """What `reduce` or `after_gradients` of a feature leaves for its `after_update`, by name."""
    metrics: dict[str, jax.Array] = field(default_factory=dict)
    """The same on every device."""
    records: dict[str, jax.Array] = field(default_factory=dict)
    """[B, T, ...] of this device's tokens."""
    trainable: Tree = None
    """In `after_update`: the trainable parameters after the update."""
    frozen: Tree = None
    """In `after_update`: the frozen parameters."""
    old: Tree = None
    """In `after_update`: the trainable parameters before the update."""
    ok: Any = True
    """bool scalar: whether the update counts. If False, a feature must keep parameters and state
    as they were."""

    @property
    def cfg(self) -> Config:
        return self.ex.cfg

    @property
    def layers(self) -> dict[str, jax.Array]:
        """Logical indices of this device's layers, by their names, int32."""
        return rows_here(self.cfg)

    def with_metrics(self, **metrics: jax.Array) -> "TrainStep":
        """Add metrics."""
        return dataclasses.replace(self, metrics=self.metrics | metrics)

    @property
    def specs(self) -> Tree:
        """ParamSpecs of the trainable parameters."""
        return trainable_specs(self.cfg)

    def with_extra(self, **extra: Any) -> "TrainStep":
        """Replace the state of features, by name."""
        return dataclasses.replace(self, extra=self.extra | extra)

    def replace(self, **fields: Any) -> "TrainStep":
        """Return a step with other fields."""
        return dataclasses.replace(self, **fields)

    def if_ok(self, new: Tree, old: Tree) -> Tree:
        """Return `new` if the update counts, else `old`."""
        return jax.tree.map(lambda a, b: a if a is b else jnp.where(self.ok, a, b), new, old)

    def after(self, feature: "Feature") -> "TrainStep":
        """Return the step after `feature.after_update`, without what it changed if not `ok`."""
        new = feature.after_update(self)
        if feature.handles_skips:
            return new
        changed = {n: getattr(new, n) for n in ("trainable", "frozen", "extra")}
        return new.replace(**{n: self.if_ok(a, getattr(self, n)) for n, a in changed.items()})

    def layer_sums(self, probe: str, absent: float = 0.0) -> jax.Array:
        """Sum a probe over all devices: float32 [num_layers, ...], the same on every device.

        Modules of multi-token prediction do not count.

        Args:     absent: the value of layers without its point.
        Communication: an all-reduce over every axis.
        """
        found, has = self._of_layers(self.probes[probe], 0.0)
        total, count = psum((found, has), AXES)
        return _with_absent(total, count, absent)

    def at_head(self, probe: str, reduction: Reduction) -> jax.Array:
        """Reduce a probe at the point "head" over all devices: a scalar, the same on every device.

        Communication: an all-reduce over every axis.
        """
        value = self.probes[probe].head
        assert value is not None
        is_last = lax.axis_index(PIPELINE) == lax.axis_size(PIPELINE) - 1
        if reduction == "max":
            return lax.pmax(jnp.where(is_last, jnp.max(value), -jnp.inf), AXES)
        return psum(jnp.where(is_last, value, 0.0), AXES)

    def layer_maxima(self, probe: str, absent: float = 0.0) -> jax.Array:
        """Return the maxima of a probe by row over all devices, like `layer_sums`.

        Communication: two all-reduces over every axis.
        """
        rows, largest = self.probes[probe], lambda a: None if a is None else jnp.max(a, axis=1)
        of_rows = rows._replace(stage=largest(rows.stage), before=largest(rows.before))
        found, has = self._of_layers(of_rows, -jnp.inf)
        return _with_absent(lax.pmax(varying(found), AXES), psum(has, AXES), absent)

    def _of_layers(self, found: Probed, fill: float) -> tuple[jax.Array, jax.Array]:
        """Put what this device's layers measured at their indices in the model.

        Returns:  (float32 [num_layers, ...], elsewhere `fill`; float32 [num_layers], 1 where there
                  is a value).
        """
        before, n = num_before(self.cfg), self.cfg.model.num_layers
        values = [v for v in (found.before, found.stage) if v is not None]
        total = varying(jnp.full((n, *values[0].shape[1:]), fill, jnp.float32))
        has = varying(jnp.zeros(n, jnp.float32))
        if found.before is not None:  # the same on every stage
            first = lax.axis_index(PIPELINE) == 0
            total = total.at[:before].set(jnp.where(first, found.before, fill))
            has = has.at[:before].set(1.0)
        if found.stage is not None:
            mine = layers_here(self.cfg)[jnp.array(found.places)]
            at = jnp.where(mine == EMPTY, n, mine + before)
            total = total.at[at].set(found.stage, mode="drop")
            has = has.at[at].set(1.0, mode="drop")
        return total, has

    def layer_squares(self, tree: Tree) -> jax.Array:
        """Sum the squares of each layer's arrays: float32 [num_layers], the same on every device.

        Args:     tree: like the trainable parameters: gradients, parameters or their changes.
        Communication: an all-reduce over the axes of each sharding, and one over PIPELINE.
        """
        total = jnp.zeros(self.cfg.model.num_layers, jnp.float32)
        for stack in sorted(tree.keys() & self.cfg.model.stacks.keys()):
            sums: dict[tuple[str, ...], jax.Array] = {}
            for x in jax.tree.leaves(tree[stack]):
                squares = jnp.sum(jnp.square(x.astype(jnp.float32)).reshape(len(x), -1), axis=1)
                over = tuple(axis for axis in varying_axes(x) if axis != PIPELINE)
                sums[over] = sums.get(over, jnp.float32(0)) + squares
            whole = [psum(squares, over) if over else squares for over, squares in sums.items()]
            here = functools.reduce(jnp.add, whole)
            at = rows_of_stack(stack, len(here), self.cfg)
            if stack in self.cfg.model.leading_stacks:  # on every stage
                here = here * (lax.axis_index(PIPELINE) == 0)
            total = total.at[jnp.where(at == EMPTY, len(total), at)].add(here, mode="drop")
        return psum(total, PIPELINE)


def _with_absent(values: jax.Array, count: jax.Array, absent: float) -> jax.Array:
    there = (count > 0).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(there, values, absent)


def rows_of_stack(stack: str, n: int, cfg: Config) -> jax.Array:
    """Return the model's indices of this device's n layers of a stack, int32; EMPTY for none."""
    model, places = cfg.model, jnp.array(cfg.model.places_of(stack), jnp.int32)
    if cfg.parallel.pipeline == 1 or stack in model.leading_stacks:
        return places[:n]
    if len(model.stage_stacks) == 1:
        mine = layers_here(cfg)
        return jnp.where(mine == EMPTY, EMPTY, mine + num_before(cfg))
    mine = layers_here(cfg, stack)
    return jnp.where(mine == EMPTY, EMPTY, places[mine])
