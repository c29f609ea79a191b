"""The train step and the evaluation step: one `shard_map` around everything.

Forward, backward, reduction, clipping and optimizer all run inside it on local shards, manual over
every mesh axis, with `check_vma=True`. What a step does in addition are features (`feature.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import Config
from jaxpar.config.values import OF_STEPS, require_code
from jaxpar.execution.decisions import Execution, execution_of
from jaxpar.model import fused_weights, parameters
from jaxpar.model.probes import Feed
from jaxpar.objectives.head import count_labels
from jaxpar.objectives.objective import Objective, objective_of
from jaxpar.optimizer import moments
from jaxpar.parallel.collectives import psum, varying
from jaxpar.parallel.gradients import clip, global_norm
from jaxpar.parallel.pipeline.runner import forward_only
from jaxpar.sharding.axes import AXES, BATCH_SPEC, TOKEN_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.params import join, partition_specs, split
from jaxpar.step import links
from jaxpar.step.diloco.trainers import trainer_axes
from jaxpar.step.feature import Feature
from jaxpar.step.features import declare_own_metrics, features_of
from jaxpar.step.fixed_input import with_rates
from jaxpar.step.links import Weights
from jaxpar.step.metrics import Metrics
from jaxpar.step.progress import TrainStep
from jaxpar.step.staged import schedule_of, split_microbatches, staged_model, without_backward
from jaxpar.step.state import TrainState, state_shardings, state_specs

#: What a step is requested for, if it is to have metrics of layers.
LAYERS = "layers"

#: The same, if its metrics shall have the gradients before clipping, as a tree: for checks.
GRADIENTS = "gradients"

#: In what a step returns beside state and metrics: the records of tokens.
OF_TOKENS = "of_tokens"


def make_train_step(
    cfg: Config,
    mesh: Mesh,
    max_segments: int | None = None,
    ex: Execution | None = None,
    *,
    requested: Iterable[str] = (),
    fragment: int | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return the jitted train step, which donates the state that it is given.

    Args:     max_segments: maximum number of documents in a sequence. Attention backends that
              locate documents by offset need it.
              requested: what metrics shall also have: "expert_rows", "routing", GRADIENTS; LAYERS,
              if not every step measures layers.
              fragment: whose outer gradient the step exchanges a part of (DiLoCo).
    """
    require_code(cfg, OF_STEPS)
    declare_own_metrics(cfg)
    specs, ex, everywhere = state_specs(cfg), ex or execution_of(cfg), PartitionSpec()
    as_input, requested = cfg.optimizer.schedule_as_input, tuple(requested)
    beside: dict[str, Any] = {OF_TOKENS: BATCH_SPEC}
    if GRADIENTS in requested:
        beside[GRADIENTS] = partition_specs(parameters.trainable_specs(cfg))
    step: Callable = functools.partial(train_step, ex, max_segments, requested=requested)
    for feature in features_of(cfg):
        step = feature.wrap(step, cfg, fragment)
    on_mesh: Any = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, BATCH_SPEC, *([everywhere] if as_input else [])),
        out_specs=(specs, everywhere, beside),
    )
    if cfg.train.post_updates:
        from jaxpar.step.global_updates import with_post_updates

        on_mesh = with_post_updates(on_mesh, ex, mesh, of_final_weights(features_of(cfg)))
    placed = NamedSharding(mesh, everywhere)
    to = state_shardings(cfg, mesh), None if GRADIENTS in requested else placed
    jitted: Any = jax.jit(_with_records(on_mesh), donate_argnums=0, out_shardings=to)
    return with_rates(jitted, cfg, placed) if as_input else jitted


def _with_records(step: Callable) -> Callable:
    @functools.wraps(step)
    def merged(*args: Any) -> tuple[TrainState, Metrics]:
        state, metrics, records = step(*args)
        return state, Metrics(metrics | records.pop(OF_TOKENS) | records)

    return merged


def make_eval_step(
    cfg: Config, mesh: Mesh, max_segments: int | None = None, ex: Execution | None = None
) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Return the jitted evaluation step: (params, batch) -> (sums of the objective, its count)."""
    step = jax.shard_map(
        functools.partial(eval_step, ex or execution_of(cfg), max_segments),
        mesh=mesh,
        in_specs=(state_specs(cfg).params, BATCH_SPEC),
        out_specs=PartitionSpec(),
    )
    return jax.jit(step)


def make_gradient_step(
    cfg: Config, mesh: Mesh, max_segments: int | None = None, ex: Execution | None = None
) -> Callable[[Any, Batch], tuple[Metrics, Any]]:
    """Return a jitted function (params, batch) -> (metrics, gradients), for checks."""
    require_code(cfg, OF_STEPS)
    grads = partition_specs(parameters.trainable_specs(cfg))
    step = jax.shard_map(
        functools.partial(loss_and_gradients, ex or execution_of(cfg), max_segments),
        mesh=mesh,
        in_specs=(state_specs(cfg).params, BATCH_SPEC),
        out_specs=(PartitionSpec(), grads),
    )
    return jax.jit(step)


# ------------------------------------------------- inside the shard_map, on local shards


def train_step(
    ex: Execution,
    max_segments: int | None,
    state: TrainState,
    batch: Batch,
    rates: jax.Array | None = None,
    *,
    requested: tuple[str, ...] = (),
) -> tuple[TrainState, Metrics, dict[str, Any]]:
    """Take one optimizer step. If loss or gradients are non-finite, only step and guard change."""
    features = features_in(ex.cfg, requested)
    later = of_final_weights(features) if ex.cfg.train.post_updates else ()
    s = TrainStep(ex, state.step, state.params, batch, state.extra, requested)
    s = gradients(s, features, max_segments)
    s, opt_state = updated(s, state.opt_state, rates)
    s = functools.reduce(TrainStep.after, [f for f in features if f not in later], s)
    params = join(s.trainable, s.frozen)
    state = TrainState(state.step + 1, params, opt_state, s.extra)
    return state, Metrics(s.metrics), _beside(s)


def _beside(s: TrainStep) -> dict[str, Any]:
    """Return what a step has beside state and metrics."""
    return {OF_TOKENS: s.records} | ({GRADIENTS: s.grads} if GRADIENTS in s.requested else {})


def loss_and_gradients(
    ex: Execution, max_segments: int | None, params: Any, batch: Batch
) -> tuple[Metrics, Any]:
    """Compute the metrics and the gradients, without an update and state of features."""
    requested = (LAYERS,)
    features = features_in(ex.cfg, requested)
    s = gradients(TrainStep(ex, None, params, batch, requested=requested), features, max_segments)
    return Metrics(s.metrics), s.grads


def gradients(s: TrainStep, features: tuple[Feature, ...], max_segments: int | None) -> TrainStep:
    """Compute the mean loss over the global batch and its gradients, sharded like the parameters.

    Communication: the model's; that of the links; scalars; that of features.
    """
    ex, cfg, axes, objective = s.ex, s.cfg, trainer_axes(s.cfg, TOKEN_AXES), objective_of(s.cfg)
    probes = tuple(probe for feature in features for probe in feature.probes(cfg, s.requested))
    feeds = tuple(feed for feature in features for feed in feature.feeds(cfg, s.batch))
    s = each(features, "before_gradients", s)
    num_tokens = count_labels(s.batch, axes)
    count, known = counted(s, num_tokens, max_segments, feeds)
    batch = with_rows(s.batch) if feeds or any(probe.by_row for probe in probes) else s.batch
    to_model = [links.probed(ex, probes, batch), links.fed(s.fed), links.slots(ex)]
    chain = links.chain([*links.of_parameters(ex, links.sum_of(features, s)), *to_model])
    weights, back = chain(Weights(s.params))
    model = staged_model(ex, max_segments, s.scale, s.step, probes, feeds, known)
    microbatches = split_microbatches(batch, cfg.parallel.num_microbatches)
    (_, sums), grads = schedule_of(cfg)(model, *weights[:2], microbatches, s.scale / count)
    grads, found = back(grads)
    mean = objective.summed(sums, axes) / count
    norm = global_norm(fused_weights.unstack_layers(grads, cfg), trainer_axes(cfg, AXES))
    s = s.replace(grads=grads, probes=found.pop(links.PROBES), results=found)
    s = s.with_metrics(grad_norm=norm, num_tokens=num_tokens, **objective.report(mean))
    return each(features, "after_gradients", s)


def counted(
    s: TrainStep, num_tokens: jax.Array, max_segments: int | None, feeds: tuple[Feed, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Return what the sums of a batch are divided by, and the loss, if that took a forward."""
    axes, objective = trainer_axes(s.cfg, TOKEN_AXES), objective_of(s.cfg)
    if type(objective).count is Objective.count:
        return num_tokens, None
    if (count := objective.count(s.batch, axes)) is not None:
        return count, None
    sums, count = evaluated(s, max_segments, axes, feeds)
    return count, sums[0] / count


def updated(s: TrainStep, opt_state: Any, rates: jax.Array | None) -> tuple[TrainStep, Any]:
    """Take the optimizer's step, if loss and gradients are finite. Returns opt_state, too."""
    cfg, specs = s.cfg, parameters.trainable_specs(s.cfg)
    ok = jnp.isfinite(s.metrics["loss"]) & jnp.isfinite(s.metrics["grad_norm"])
    old, frozen = split(s.params, parameters.specs_of(cfg))
    with jax.named_scope("optimizer"):
        grads = clip(s.grads, s.metrics["grad_norm"], cfg.optimizer.clip_norm)
        trainable, opt_state = moments.update(
            cfg, specs, grads, opt_state, old, s.step, s.layers, ok, rates
        )
    return s.replace(trainable=trainable, old=old, frozen=frozen, ok=ok), opt_state


def features_in(cfg: Config, requested: tuple[str, ...]) -> tuple[Feature, ...]:
    """Return the features of a step."""
    layers = cfg.metrics.layers_every == 1 or LAYERS in requested
    return tuple(feature for feature in features_of(cfg) if layers or not feature.by_layer)


def of_final_weights(features: tuple[Feature, ...]) -> tuple[Feature, ...]:
    """Return the features that read the weights that a step ends with."""
    return tuple(feature for feature in features if feature.of_final_weights)


def each(features: tuple[Feature, ...], hook: str, s: TrainStep) -> TrainStep:
    """Call a method of each feature in turn."""
    return functools.reduce(lambda s, feature: getattr(feature, hook)(s), features, s)


def with_rows(batch: Batch) -> Batch:
    """Number the rows of this device's batch, which microbatches then share."""
    rows = varying(jnp.arange(len(batch.tokens), dtype=jnp.int32))
    return dataclasses.replace(batch, rows=rows)


def eval_step(ex: Execution, max_segments: int | None, params: Any, batch: Batch):
    """Compute the objective's sums of a global batch, and its count."""
    return evaluated(TrainStep(ex, None, params, batch), max_segments, TOKEN_AXES)


def evaluated(
    s: TrainStep, max_segments: int | None, axes: tuple[str, ...], feeds: tuple[Feed, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """Compute the objective's sums of a batch by a forward, and its count.

    Args:     axes: over which tokens are split.
    """
    ex = without_backward(s.ex)
    cfg, objective = ex.cfg, objective_of(ex.cfg)
    weights, _ = links.chain(links.of_evaluation(ex, s.fed))(Weights(s.params))
    batch = with_rows(s.batch) if feeds else s.batch
    microbatches = split_microbatches(batch, cfg.parallel.num_microbatches)
    model = staged_model(ex, max_segments, feeds=feeds)
    _, sums = forward_only(model, join(*weights[:2]), microbatches, cfg.parallel.virtual_stages)
    sums = psum(sums, axes)
    count = objective.count(s.batch, axes)
    return (sums[:-1], sums[-1]) if count is None else (sums, count)
