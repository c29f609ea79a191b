"""A step with users' post-updates, which run on global arrays after the `shard_map`."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.execution.decisions import Execution
from jaxpar.model.parameters import specs_of
from jaxpar.sharding.params import split
from jaxpar.step.feature import Feature
from jaxpar.step.features.post_updates import applied
from jaxpar.step.metrics import Step
from jaxpar.step.progress import TrainStep
from jaxpar.step.state import TrainState, state_specs


def with_post_updates(step: Step, ex: Execution, mesh: Mesh, last: tuple[Feature, ...]) -> Step:
    """Return a step that applies the post-updates of its config.

    Args:     step: on global arrays. last: features that read the weights that a step ends with.
    """

    def whole(state: TrainState, batch: Any, *more: Any) -> Any:
        new, metrics, records = step(state, batch, *more)
        ok = metrics["in_a_row"] == 0
        params, extra = applied(ex.cfg, mesh, new.params, state.params, new.extra, state.step, ok)
        new = dataclasses.replace(new, params=params).with_extra(**extra)
        if last:
            new = new.with_extra(**_finished(ex, mesh, last)(new, state.step, ok))
        return new, metrics, records

    return whole


def _finished(ex: Execution, mesh: Mesh, last: tuple[Feature, ...]) -> Any:
    """Return a function (state after the post-updates, steps before this one, whether the update
    counts) -> the new state of some features, by name."""
    specs, everywhere = state_specs(ex.cfg), PartitionSpec()

    def finish(new: TrainState, step: jax.Array, ok: jax.Array) -> dict[str, Any]:
        trainable, frozen = split(new.params, specs_of(ex.cfg))
        nothing: Any = None
        s = TrainStep(ex, step, new.params, batch=nothing, extra=new.extra)
        s = s.replace(trainable=trainable, frozen=frozen, old=trainable, ok=ok)
        for feature in last:
            s = s.after(feature)
        return {feature.name: s.extra[feature.name] for feature in last}

    out = {feature.name: specs.extra[feature.name] for feature in last}
    return jax.shard_map(finish, mesh=mesh, in_specs=(specs, everywhere, everywhere), out_specs=out)
