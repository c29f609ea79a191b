"""The train step and the evaluation step: one `shard_map` around everything.

Forward, backward, reduction, clipping and optimizer all run inside it on local shards, manual over
every mesh axis, with `check_vma=True`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import Config, replace
from jaxpar.config.layout.layer_split import dense_before_stages
from jaxpar.execution.decisions import Execution, execution_of
from jaxpar.model import fused_weights, parameters, transformer
from jaxpar.model.attention_context import (
    AttentionContext,
    across_devices,
    attention_context,
    with_loss_weight,
)
from jaxpar.model.moe.router import loss_weight_of
from jaxpar.model.moe.tallies import with_tallies, without_tallies
from jaxpar.model.weights import with_float32_gradients
from jaxpar.optimizer import loss_scale, moments, moving_average
from jaxpar.parallel.accumulation import accumulate
from jaxpar.parallel.collectives import psum, varying
from jaxpar.parallel.gradients import clip, global_norm
from jaxpar.parallel.pipeline.gpipe import gpipe
from jaxpar.parallel.pipeline.runner import forward_only, one_f_one_b
from jaxpar.parallel.pipeline.zero_bubble import zero_bubble
from jaxpar.parallel.staged_model import StagedModel
from jaxpar.sharding.axes import AXES, BATCH_SPEC, PIPELINE, TOKEN_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.params import join, partition_specs, split
from jaxpar.step import objective, qk_clip, recorded_routing
from jaxpar.step.diloco.inner import of_each_replica
from jaxpar.step.diloco.overlap import beside
from jaxpar.step.diloco.trainers import num_trainers, trainer_axes
from jaxpar.step.expert_loads import (
    ExpertLoads,
    balance_bias,
    bias_range,
    load_metrics,
    reduce_tallies,
    rows_of_all_layers,
)
from jaxpar.step.fixed_input import with_rates
from jaxpar.step.host_masters import weights_on_device
from jaxpar.step.layer_order import layers_here, slots_in_use
from jaxpar.step.loss_weights import loss_weights
from jaxpar.step.state import TrainState, state_shardings, state_specs
from jaxpar.step.step_weights import scatter_once, summed, weights_of_step


@flax.struct.dataclass
class StepMetrics:
    """The metrics of a step: float32 scalars, the same on every device."""

    loss: jax.Array
    """Cross entropy per labeled token, in nats; with preferences, the loss per pair."""
    grad_norm: jax.Array
    """Global norm of the gradient before clipping."""
    num_tokens: jax.Array
    """Number of labeled tokens in the batch."""
    skipped: jax.Array | None = None
    """Number of updates skipped so far, including this step's."""
    in_a_row: jax.Array | None = None
    """Number of updates skipped since the last one that was made."""
    loss_scale: jax.Array | None = None
    """Factor by which the loss of this step was multiplied. 1 except in float16."""
    expert_entropy: jax.Array | None = None
    """Entropy of the experts' loads, mean over layers, relative to equal loads: 1 is balanced.
    This and what follows: only with experts."""
    fullest_expert: jax.Array | None = None
    """Load of the fullest expert of any layer, relative to the mean."""
    fullest_rank: jax.Array | None = None
    """Load of the fullest rank of the expert axis in any layer, relative to the mean."""
    fullest_rank_mean: jax.Array | None = None
    """Mean over layers of the load of a layer's fullest rank, for which the other ranks wait."""
    further_rounds: jax.Array | None = None
    """Rounds beyond the first of an expert axis, summed over layers, microbatches and devices."""
    dropped_rows: jax.Array | None = None
    """Pairs of token and expert that were not computed, in the worst layer. Always 0."""
    balance_loss: jax.Array | None = None
    """`train.balance_loss` before its weight, mean over layers: 1 is balanced."""
    router_z_loss: jax.Array | None = None
    """`train.router_z_loss` before its weight, mean over layers."""
    router_bias_range: jax.Array | None = None
    """Largest difference between the biases of a layer's experts."""
    reward_accuracy: jax.Array | None = None
    """Share of pairs whose chosen response has the higher reward. This and what follows, up to
    `rejected_reward`: means over pairs, only with preferences (`objectives/dpo.py`)."""
    reward_margin: jax.Array | None = None
    """Reward of the chosen response minus that of the rejected one."""
    chosen_reward: jax.Array | None = None
    """Reward of the chosen response."""
    rejected_reward: jax.Array | None = None
    """Reward of the rejected response."""
    distill_loss: jax.Array | None = None
    """Divergence of the student from the teacher per labeled token, in nats, before its weight.
    Only in distillation (`objectives/distillation.py`)."""
    mtp_loss: jax.Array | None = None
    """Loss of the modules of multi-token prediction, mean over them: a sum over their labels,
    divided by `num_tokens`."""
    max_attention_logit: jax.Array | None = None
    """Largest attention logit of all heads, before the update. This and the next: with
    `optimizer.qk_clip`."""
    clipped_heads: jax.Array | None = None
    """Number of heads, of all layers, whose logits were above the limit."""
    attention_logits: jax.Array | None = None
    """float32 [layers here, H/tensor], not a scalar: largest logits, inside the step only."""
    expert_rows: jax.Array | None = None
    """float32 [layers with experts, E], not a scalar: tokens of each expert. Only on request."""
    routing: jax.Array | None = None
    """unsigned [B, T, layers with experts, k]: the experts of each token, as `Batch.experts`. Only
    on request."""


#: The sharding of each metric, in place of its array.
METRIC_SPECS: Any = StepMetrics(
    **{field.name: PartitionSpec() for field in dataclasses.fields(StepMetrics)}  # type: ignore
).replace(routing=BATCH_SPEC)


def make_train_step(
    cfg: Config,
    mesh: Mesh,
    max_segments: int | None = None,
    ex: Execution | None = None,
    *,
    expert_rows: bool = False,
    record: bool = False,
    fragment: int | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Return the jitted train step, which donates the state that it is given.

    Args:     max_segments: maximum number of documents in a sequence. Attention backends that
              locate documents by offset need it. expert_rows, record: whether the metrics have
              `StepMetrics.expert_rows` and `StepMetrics.routing`, if the model has a router that
              is trained. fragment: whose outer gradient the step exchanges a part of
              (`diloco/overlap.py`).
    """
    specs, ex = state_specs(cfg), ex or execution_of(cfg)
    as_input = cfg.optimizer.schedule_as_input
    one = functools.partial(train_step, ex, max_segments, expert_rows=expert_rows, record=record)
    every: Callable = of_each_replica(one) if num_trainers(cfg) else one
    step = jax.shard_map(
        every if fragment is None else beside(every, cfg, fragment),
        mesh=mesh,
        in_specs=(specs, BATCH_SPEC, *([PartitionSpec()] if as_input else [])),
        out_specs=(specs, METRIC_SPECS),
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    kept = state_shardings(cfg, mesh), everywhere
    jitted: Any = jax.jit(step, donate_argnums=0, out_shardings=kept)
    return with_rates(jitted, cfg, everywhere) if as_input else jitted


def make_eval_step(
    cfg: Config, mesh: Mesh, max_segments: int | None = None, ex: Execution | None = None
) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Return the jitted evaluation step: (params, batch) -> (summed loss, labeled tokens).

    With preferences, (float32 [len(MEASURES)]: sums of `dpo.measures`, pairs).
    """
    step = jax.shard_map(
        functools.partial(eval_step, ex or execution_of(cfg), max_segments),
        mesh=mesh,
        in_specs=(state_specs(cfg).params, BATCH_SPEC),
        out_specs=PartitionSpec(),
    )
    return jax.jit(step)


def make_gradient_step(
    cfg: Config, mesh: Mesh, max_segments: int | None = None, ex: Execution | None = None
) -> Callable[[Any, Batch], tuple[StepMetrics, Any]]:
    """Return a jitted function (params, batch) -> (StepMetrics, gradients), for checks."""
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
    expert_rows: bool = False,
    record: bool = False,
) -> tuple[TrainState, StepMetrics]:
    """Take one optimizer step. If loss or gradients are non-finite, only step and guard change."""
    cfg, scale = ex.cfg, state.guard["loss_scale"]
    metrics, grads, loads, feedback = loss_gradients_and_loads(
        ex,
        max_segments,
        state.params,
        batch,
        scale,
        record=record,
        step=state.step,
        feedback=state.feedback,
    )
    ok = jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.grad_norm)
    trainable, frozen = split(state.params, parameters.specs_of(cfg))
    with jax.named_scope("optimizer"):
        grads = clip(grads, metrics.grad_norm, cfg.optimizer.clip_norm)
        specs, layers = parameters.trainable_specs(cfg), layers_here(cfg)
        trainable, opt_state = moments.update(
            cfg, specs, grads, state.opt_state, trainable, state.step, layers, ok, rates
        )
        if metrics.attention_logits is not None:
            trainable = qk_clip.clip(trainable, metrics.attention_logits, ok, cfg)
            metrics = dataclasses.replace(metrics, attention_logits=None)
        ema = moving_average.update(cfg, specs, state.ema, trainable, state.step, layers, ok)
        feedback = jax.tree.map(functools.partial(jnp.where, ok), feedback, state.feedback)
    if cfg.model.router_bias:
        frozen = balance_bias(frozen, loads, ok, cfg)
        metrics = dataclasses.replace(metrics, router_bias_range=bias_range(frozen))
    if expert_rows and loads is not None:
        metrics = dataclasses.replace(metrics, expert_rows=rows_of_all_layers(loads, cfg))
    if record and loads is not None:
        routing = recorded_routing.of_all_layers(loads, cfg)
        metrics = dataclasses.replace(metrics, routing=routing)
    guard = loss_scale.update_guard(cfg, state.guard, ok)
    counts = {name: guard[name].astype(jnp.float32) for name in ("skipped", "in_a_row")}
    metrics = dataclasses.replace(metrics, loss_scale=scale, **counts)
    params = join(trainable, frozen)
    state = TrainState(state.step + 1, params, opt_state, guard, ema, feedback=feedback)
    return state, metrics


def loss_and_gradients(
    ex: Execution,
    max_segments: int | None,
    params: Any,
    batch: Batch,
    scale: jax.Array | float = 1.0,
) -> tuple[StepMetrics, Any]:
    """`loss_gradients_and_loads` without the loads, and with a sum over replicas in float32."""
    metrics, grads, *_ = loss_gradients_and_loads(ex, max_segments, params, batch, scale)
    return dataclasses.replace(metrics, attention_logits=None), grads


def loss_gradients_and_loads(
    ex: Execution,
    max_segments: int | None,
    params: Any,
    batch: Batch,
    scale: jax.Array | float = 1.0,
    *,
    record: bool = False,
    step: jax.Array | None = None,
    feedback: Any = None,
) -> tuple[StepMetrics, Any, ExpertLoads | None, Any]:
    """Compute the mean loss over the global batch and its gradients, sharded like the parameters.

    Args:     scale: factor of the loss in its backward (`optimizer/loss_scale.py`). record: whether
              the loads have the experts of each token. step: int32 scalar, steps before this one;
              None counts as none. feedback: as in a state. None: sum over replicas in float32.
    Returns:  (StepMetrics, float32 gradients of the trainable parameters, loads of the experts,
              the new feedback).
    Communication: the model's; FSDP's scatters; one `reduce_gradients`; scalars.
    """
    cfg, token_axes = ex.cfg, trainer_axes(ex.cfg, TOKEN_AXES)
    num_tokens = objective.count_labels(batch, token_axes)
    count = objective.count(batch, cfg) if cfg.dpo.beta else num_tokens
    trainable, frozen = split(varying(weights_on_device(params, cfg)), parameters.specs_of(cfg))
    shards, unfuse = jax.vjp(lambda p: fused_weights.fuse(p, ex), trainable)
    weights = weights_of_step(shards, cfg)
    if frozen:
        frozen = weights_of_step(fused_weights.fuse(frozen, ex), cfg)
    if cfg.parallel.zero == 2:
        weights, complete = fused_weights.to_shards(weights, shards)
        frozen = join(complete, frozen)
    weights = with_tallies(weights, cfg)
    frozen = join(frozen, slots_in_use(cfg))
    if record or batch.experts is not None:
        weights, frozen, batch = recorded_routing.attach(weights, frozen, batch, record, cfg)
    if cfg.optimizer.qk_clip:
        weights, batch = qk_clip.attach(weights, batch, cfg)
    model = staged_model(ex, max_segments, scale, step)
    microbatches = split_microbatches(batch, cfg.parallel.num_microbatches)
    run = schedule_of(cfg)
    (_, loss_sum), grads = run(model, weights, frozen, microbatches, scale / count)
    grads, tallies = without_tallies(fused_weights.without_scales(grads))
    grads, experts = recorded_routing.detach(grads)
    grads, logits = qk_clip.detach(grads, cfg)
    if cfg.parallel.zero == 1:
        grads = scatter_once(grads, cfg)
    (grads,) = unfuse(grads)
    axes = trainer_axes(cfg, AXES)
    grads, feedback = summed(grads, feedback, scale, cfg)
    loss = psum(loss_sum, token_axes) / count
    norm = global_norm(fused_weights.unstack_layers(grads, cfg), axes)
    named = objective.reported(loss, cfg)
    metrics = StepMetrics(grad_norm=norm, num_tokens=num_tokens, **named)
    metrics = dataclasses.replace(metrics, **qk_clip.metrics(logits, cfg))
    if tallies is None:
        return metrics, grads, None, feedback
    tokens = batch.tokens.size * lax.axis_size(TOKEN_AXES)
    loads = reduce_tallies(tallies, tokens, cfg, experts)
    metrics = dataclasses.replace(metrics, **load_metrics(loads, tokens, cfg))
    return metrics, grads, loads, feedback


def eval_step(ex: Execution, max_segments: int | None, params: Any, batch: Batch):
    """Compute the summed loss of a global batch, and the number of its labeled tokens or pairs."""
    ex = without_backward(ex)
    cfg = ex.cfg
    params = weights_on_device(params, cfg)
    weights = weights_of_step(fused_weights.fuse(varying(params), ex), cfg)
    microbatches = split_microbatches(batch, cfg.parallel.num_microbatches)
    weights = join(weights, slots_in_use(cfg))
    model = staged_model(ex, max_segments)
    _, loss_sum = forward_only(model, weights, microbatches, cfg.parallel.virtual_stages)
    return psum(loss_sum, TOKEN_AXES), objective.count(batch, cfg)


def without_backward(ex: Execution) -> Execution:
    """Return the execution of a step without a backward, where ZeRO-2 is the same as ZeRO-1."""
    if ex.cfg.parallel.zero != 2:
        return ex
    once = replace(ex.cfg, **{"parallel.zero": 1})
    return dataclasses.replace(ex, cfg=once, scatters_per_layer=False)


def split_microbatches(batch: Batch, n: int) -> Batch:
    """Reshape a batch from [b, t] to [n, b/n, t]."""
    return jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), batch)


def staged_model(
    ex: Execution,
    max_segments: int | None,
    scale: jax.Array | float | None = None,
    step: jax.Array | None = None,
) -> StagedModel:
    """Return the configured model in the form that the schedules of microbatches run.

    Args:     scale: factor of the loss in its backward, for the losses of routers. None without a
              backward. step: as in `loss_gradients_and_loads`.
    """
    cfg, weights = ex.cfg, loss_weights(ex.cfg, step)

    def context(mb: Batch) -> AttentionContext:
        context = across_devices(attention_context(mb, cfg, max_segments), cfg)
        if scale is None or not cfg.model.num_experts:
            return context
        weight = loss_weight_of(mb.tokens, scale, cfg.parallel.num_microbatches)
        return with_loss_weight(context, weight)

    embed = functools.partial(transformer.embed, cfg=cfg)
    if dense_before_stages(cfg.model, cfg.parallel):
        embed = functools.partial(transformer.embed_and_dense_layers, ex=ex, context_of=context)
    head = objective.head_of(cfg, weights, max_segments, trains=scale is not None)
    if cfg.model.mtp_depth and scale is not None:
        head = functools.partial(
            transformer.head_with_modules, ex=ex, context_of=context, weights=weights
        )
    return StagedModel(
        embed=embed,
        context=context,
        stage=functools.partial(transformer.stage, ex=ex, layers_of=transformer.rematerialized(ex)),
        head=head,
        attach=functools.partial(with_float32_gradients, ex=ex),
        stage_wide_collectives=ex.stage_wide_collectives,
        adds_gradients=cfg.model.num_experts > 0 or cfg.optimizer.qk_clip > 0,
        layers_per_vjp=ex.layers_per_vjp,
    )


def schedule_of(cfg: Config) -> Callable:
    """Return the schedule of microbatches: gradient accumulation, or a pipeline over stages."""
    if lax.axis_size(PIPELINE) == 1:
        return accumulate
    p = cfg.parallel
    if p.schedule == "gpipe":
        return functools.partial(gpipe, save=p.pipeline_save)
    interleaved = zero_bubble if p.schedule == "zero_bubble" else one_f_one_b
    return functools.partial(interleaved, virtual=p.virtual_stages, save=p.pipeline_save)
