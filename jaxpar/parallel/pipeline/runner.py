"""Interleaved 1F1B: run microbatches through a model that is split into stages over PIPELINE.

Takes a `StagedModel`, weights and microbatches, and returns summed losses and float32 gradients.
The loops over ticks are not differentiated and save nothing per tick, so memory does not grow with
the number of microbatches.

An action is one microbatch in one chunk of layers, forward or backward (`schedules.py`). At each
tick, every stage has a forward and a backward slot (`slots.py`).
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.pipeline import slots
from jaxpar.parallel.pipeline.schedules import PipelineSchedule
from jaxpar.parallel.pipeline.slots import to_stage
from jaxpar.parallel.staged_model import StagedModel, Sums, take
from jaxpar.sharding.params import join


def forward_only(model: StagedModel, weights: Any, microbatches: Any, virtual: int) -> Sums:
    """Compute loss sums without gradients, for evaluation, with or without stages."""
    step = slots.step_of(PipelineSchedule, model, weights, microbatches, virtual=virtual)
    schedule, P = step.schedule, step.schedule.stages

    def tick(carry, t):
        y, _ = slots.forward(step, carry["x"], t, None)
        done = t - (P - 1)
        m, c = schedule.forward_action(jnp.clip(done, 0, schedule.num_actions - 1))
        ready = (done >= 0) & (done < schedule.num_actions) & (c == virtual - 1)

        def with_loss():  # all stages call it at the same ticks
            sums = model.head(step.top, y, take(microbatches, m))
            return jax.tree.map(jnp.add, carry["sums"], sums)

        # Without stages, every tick is ready, and a branch would delay the head's gathers.
        sums = with_loss() if P == 1 else lax.cond(ready, with_loss, lambda: carry["sums"])
        return dict(x=to_stage(y, 1), sums=sums), None

    ticks = jnp.arange(schedule.num_actions + P - 1)
    carry: dict[str, Any] = dict(x=step.blank(), sums=step.no_loss())
    carry, _ = lax.scan(tick, carry, ticks)
    return carry["sums"]


def one_f_one_b(
    model: StagedModel,
    trainable: Any,
    frozen: Any,
    microbatches: Any,
    scale: jax.Array,
    *,
    virtual: int,
    save: Literal["residuals", "inputs"],
) -> tuple[Sums, Any]:
    """Compute loss and gradients of a model split into stages over PIPELINE, by interleaved 1F1B.

    Args:     trainable: {"top", "layers"}, varying over every axis; layers is a tuple of this
              stage's v chunks. frozen: as in `accumulate`. microbatches: a Batch of [M, ...].
              scale: the loss's cotangent. save: what the stash stores for the backward: the
              residuals of the VJP under the remat policy, or the inputs of chunks, whose forward
              then runs again.
    Returns:  (loss sums over the local tokens, float32 gradients like `trainable`).
    Communication: per tick, a permute of [B, T/(sequence*tensor), D] in each direction over
              PIPELINE; that of the embedding, the layers and the head.
    """
    weights = join(trainable, frozen)
    step = slots.step_of(
        PipelineSchedule, model, weights, microbatches, virtual=virtual, scale=scale, save=save
    )
    carry = slots.empty_carry(step, trainable)
    phases = step.schedule.phases()
    if not model.stage_wide_collectives:  # idle stages skip work: one loop, compiled once
        phases = ((True, True, 0, phases[-1][-1]),)
    for forwards, backwards, start, stop in phases:
        tick = partial(_tick, step, forwards, backwards)
        carry, _ = lax.scan(tick, carry, jnp.arange(start, stop))
    return slots.results(step, carry)


def _tick(step: slots.Step, forwards: bool, backwards: bool, carry: dict, t: jax.Array):
    """Run one forward and one backward slot. The next tick reads the permutes, so they overlap."""
    carry = dict(carry)
    d_head = jnp.zeros_like(carry["x"])
    if forwards:
        y, carry["stash"] = slots.forward(step, carry["x"], t, carry["stash"])
        if backwards:
            done = t - (step.schedule.stages - 1)
            carry["sums"], carry["grads"], d_head = slots.head(step, carry, y, done)
        carry["x"] = to_stage(y, 1)
    if backwards:
        carry["grads"], dx = slots.backward(step, carry, d_head, t)
        carry["g"] = to_stage(dx, -1)
    return carry, None
