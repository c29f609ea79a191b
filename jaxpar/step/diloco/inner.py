"""The inner step: a train step of each replica on its own, inside the `shard_map`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives import all_gather_invariant
from jaxpar.sharding.axes import REPLICA
from jaxpar.step.diloco.trainers import WEIGHTS

#: Metrics that are the sum, or the largest, of the replicas'. Others are means over their tokens.
SUMS, LARGEST = ("num_tokens", "skipped"), ("in_a_row", "max_attention_logit")


def of_each_replica(step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Return the step of all replicas, from that of one trainer without DiLoCo.

    Args:     step: (TrainState, batch, ...) -> (TrainState, StepMetrics), on local shards, without
              a collective over REPLICA.
    Communication: an all-gather of the metrics over REPLICA: some ten floats.
    """

    def inner(state: Any, batch: Any, *more: Any) -> tuple[Any, Any]:
        own, metrics = step(_own(state), batch, *more)
        back = lambda tree: jax.tree.map(lambda a: a[None], tree)  # noqa: E731
        new = dataclasses.replace(
            state,
            step=own.step,
            opt_state=back(own.opt_state),
            guard=back(own.guard),
            diloco=state.diloco | {WEIGHTS: back(own.params)},
        )
        return new, _of_all(metrics)

    return inner


def _own(state: Any) -> Any:
    """Return this replica's TrainState, as without DiLoCo."""
    own = (state.diloco[WEIGHTS], state.opt_state, state.guard)
    params, opt_state, guard = jax.tree.map(lambda a: a[0], own)
    return dataclasses.replace(state, params=params, opt_state=opt_state, guard=guard, diloco=())


@jax.named_scope("metrics_of_replicas")
def _of_all(metrics: Any) -> Any:
    """Return the metrics of all replicas together, the same on every device."""
    names = [name for name, value in vars(metrics).items() if value is not None]
    own = jnp.stack([getattr(metrics, name) for name in names])
    table = all_gather_invariant(own[None], (REPLICA,), 0)
    columns = dict(zip(names, table.T, strict=True))
    tokens = columns["num_tokens"]

    def joined(name: str) -> jax.Array:
        if name in SUMS:
            return jnp.sum(columns[name])
        if name in LARGEST:
            return jnp.max(columns[name])
        return jnp.sum(columns[name] * tokens) / jnp.sum(tokens)

    return dataclasses.replace(metrics, **{name: joined(name) for name in names})
