"""The configured model in the form that the schedules of microbatches run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.experts import experts_in
from jaxpar.config import Config, replace, value_of
from jaxpar.config.layout.layer_split import layers_before_stages
from jaxpar.config.lists.weight_schedules import CONSTANT, MTP_LOSS, Z_LOSS
from jaxpar.execution.decisions import Execution
from jaxpar.model import transformer
from jaxpar.model.attention_context import (
    Contexts,
    across_devices,
    attention_context,
    with_loss_weight,
    with_probes,
)
from jaxpar.model.loss import LossWeights
from jaxpar.model.probes import HEAD, Feed, LayerProbe, observe_head
from jaxpar.model.weights import with_float32_gradients
from jaxpar.objectives.head import Head
from jaxpar.objectives.objective import head_of, objective_of
from jaxpar.parallel.accumulation import accumulate
from jaxpar.parallel.pipeline.runner import one_f_one_b
from jaxpar.parallel.staged_model import StagedModel, Sums
from jaxpar.sharding.axes import PIPELINE
from jaxpar.sharding.batch import Batch


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
    probes: tuple[LayerProbe, ...] = (),
    feeds: tuple[Feed, ...] = (),
    mean: jax.Array | None = None,
) -> StagedModel:
    """Return the configured model in the form that the schedules of microbatches run.

    Args:     scale: factor of the loss in its backward, for the losses of routers. None without a
              backward.
              step: int32 scalar, steps before this one; None counts as none.
              probes, feeds: what leaves and enters the layers. mean: as in `Head`.
    """
    cfg, weights = ex.cfg, loss_weights(ex.cfg, step)
    has_experts = bool(experts_in(cfg.model))
    of_routers = scale is not None and has_experts and cfg.lora is None

    def context(mb: Batch) -> Contexts:
        context = across_devices(attention_context(mb, cfg, max_segments), cfg)
        context = with_probes(context, probes, feeds) if probes or feeds else context
        if not of_routers or scale is None:
            return context
        from jaxpar.model.moe.router import loss_weight_of

        weight = loss_weight_of(mb.tokens, scale, cfg.parallel.num_microbatches)
        return with_loss_weight(context, weight)

    embed = functools.partial(transformer.embed, cfg=cfg)
    if layers_before_stages(cfg.model, cfg.parallel):
        embed = functools.partial(transformer.embed_and_first_layers, ex=ex, context_of=context)
    of_head = Head(ex, weights, context, max_segments, trains=scale is not None, mean=mean)
    head = head_of(objective_of(cfg), of_head)
    if any(probe.point == HEAD for probe in probes):
        head = functools.partial(_observed, head, probes, cfg)
    return StagedModel(
        embed=embed,
        context=context,
        stage=functools.partial(transformer.stage, ex=ex, layers_of=transformer.rematerialized(ex)),
        head=head,
        attach=functools.partial(with_float32_gradients, ex=ex),
        stage_wide_collectives=ex.stage_wide_collectives,
        adds_gradients=bool(probes) or has_experts,
        layers_per_vjp=ex.layers_per_vjp,
    )


def _observed(
    head: Callable[..., Sums],
    probes: tuple[LayerProbe, ...],
    cfg: Config,
    top: Any,
    x: jax.Array,
    mb: Batch,
) -> Sums:
    return head(top, observe_head(x, top, mb.rows, probes, cfg), mb)


def schedule_of(cfg: Config) -> Callable:
    """Return the schedule of microbatches: gradient accumulation, or a pipeline over stages."""
    if lax.axis_size(PIPELINE) == 1:
        return accumulate
    p = cfg.parallel
    if p.schedule == "gpipe":
        from jaxpar.parallel.pipeline.gpipe import gpipe

        return functools.partial(gpipe, save=p.pipeline_save)
    if p.schedule == "zero_bubble":
        from jaxpar.parallel.pipeline.zero_bubble import zero_bubble

        return functools.partial(zero_bubble, virtual=p.virtual_stages, save=p.pipeline_save)
    return functools.partial(one_f_one_b, virtual=p.virtual_stages, save=p.pipeline_save)


# -------------------------------------- The weights of the losses beside the cross entropy, by step


def loss_weights(cfg: Config, step: jax.Array | None) -> LossWeights:
    """Return the weights after `step` steps: numbers of the config, or float32 scalars by schedule.

    Args:     step: int32 scalar. None: after no steps.
    """

    def weight(path: str) -> jax.Array | float:
        found = value_of(cfg, path)
        if not found:
            return value_of(cfg, CONSTANT[path])
        points = zip(*((point.step, point.weight) for point in found), strict=True)
        steps, weights = (jnp.array(values, jnp.float32) for values in points)
        return jnp.interp(jnp.float32(0 if step is None else step), steps, weights)

    return LossWeights(z_loss=weight(Z_LOSS), mtp_loss=weight(MTP_LOSS))
