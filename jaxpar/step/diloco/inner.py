"""The inner step: a train step of each replica on its own, inside the `shard_map`."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config.metrics import metric_of
from jaxpar.parallel.collectives import all_gather_invariant
from jaxpar.sharding.axes import REPLICA
from jaxpar.step.diloco.trainers import WEIGHTS
from jaxpar.step.metrics import Step


def of_each_replica(step: Step) -> Step:
    """Return the step of all replicas, from that of one trainer without DiLoCo.

    Args:     step: without a collective over REPLICA, but for metrics.
    Communication: an all-gather of the metrics over REPLICA: some ten floats.
    """

    def inner(state: Any, batch: Any, *more: Any) -> tuple[Any, Any, Any]:
        own, metrics, records = step(_own(state), batch, *more)
        back = lambda tree: jax.tree.map(lambda a: a[None], tree)  # noqa: E731
        new = dataclasses.replace(
            state,
            step=own.step,
            opt_state=back(own.opt_state),
        ).with_extra(
            guard=back(own.extra["guard"]),
            diloco=state.extra["diloco"] | {WEIGHTS: back(own.params)},
        )
        return new, _of_all(metrics), records

    return inner


def _own(state: Any) -> Any:
    """Return this replica's TrainState, as without DiLoCo."""
    own = (state.extra["diloco"][WEIGHTS], state.opt_state, state.extra["guard"])
    params, opt_state, guard = jax.tree.map(lambda a: a[0], own)
    own = dataclasses.replace(state, params=params, opt_state=opt_state)
    return own.with_extra(guard=guard, diloco=())


@jax.named_scope("metrics_of_replicas")
def _of_all(metrics: Any) -> Any:
    """Return the metrics of all replicas together, the same on every device."""
    names = sorted(metrics)
    own = jnp.concatenate([metrics[name].ravel() for name in names])
    table = all_gather_invariant(own[None], (REPLICA,), 0)
    ends = itertools.accumulate(metrics[name].size for name in names)
    columns = dict(zip(names, jnp.split(table, list(ends)[:-1], axis=1), strict=True))
    tokens = columns["num_tokens"]

    def joined(name: str) -> jax.Array:
        if (over := metric_of(name).over) != "mean":
            found = (jnp.sum if over == "sum" else jnp.max)(columns[name], axis=0)
        else:
            found = jnp.sum(columns[name] * tokens, axis=0) / jnp.sum(tokens)
        return found.reshape(metrics[name].shape)

    return type(metrics)({name: joined(name) for name in names})
