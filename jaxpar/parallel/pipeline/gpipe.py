"""GPipe: run all forwards of a step, then all backwards.

The simplest schedule of a pipeline, for comparison with 1F1B (`runner.py`). Its gradients and its
bubble are the same, but what the forwards leave for the backwards waits for every microbatch at
once, so memory grows with their number.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.pipeline import slots
from jaxpar.parallel.pipeline.schedules import GPipe
from jaxpar.parallel.staged_model import StagedModel, Sums, float32_zeros, take
from jaxpar.sharding.params import join


def gpipe(
    model: StagedModel,
    trainable: Any,
    frozen: Any,
    microbatches: Any,
    scale: jax.Array,
    *,
    save: Literal["residuals", "inputs"],
) -> tuple[Sums, Any]:
    """Compute loss and gradients of a model split into stages over PIPELINE, by GPipe.

    Args, Returns, Communication: as `runner.one_f_one_b`, with one chunk of layers per stage.
    """
    weights = join(trainable, frozen)
    step = slots.step_of(GPipe, model, weights, microbatches, virtual=1, scale=scale, save=save)
    schedule, blank = step.schedule, step.blank()
    turn, end = (stop for *_, stop in schedule.phases())
    outputs = slots.empty(jax.typeof(blank), schedule.num_actions)
    carry = dict(x=blank, stash=slots.empty_stash(step, blank), outputs=outputs)
    done, _ = lax.scan(partial(_forward_tick, step), carry, jnp.arange(turn))

    grads = float32_zeros(dict(trainable, layers=step.chunks.sums_like(trainable["layers"])))
    carry = dict(g=blank, stash=done["stash"], outputs=done["outputs"], grads=grads)
    carry["sums"] = step.no_loss()
    carry, _ = lax.scan(partial(_backward_tick, step), carry, jnp.arange(turn, end))
    return slots.results(step, carry)


def _forward_tick(step: slots.Step, carry: dict, t: jax.Array):
    """Run one forward, and keep the output for the head."""
    y, saved = slots.forward(step, carry["x"], t, carry["stash"])
    # Before the last stage's first output, this writes what later ticks overwrite.
    slot = (t - (step.schedule.stages - 1)) % step.schedule.num_actions
    outputs = lax.dynamic_update_index_in_dim(carry["outputs"], y, slot, 0)
    return dict(x=slots.to_stage(y, 1), stash=saved, outputs=outputs), None


def _backward_tick(step: slots.Step, carry: dict, t: jax.Array):
    """Run the head, and one backward. The last stage starts with the head's gradient."""
    carry, m = dict(carry), t - step.schedule.first_backward
    y = take(carry["outputs"], jnp.minimum(m, step.schedule.num_actions - 1))
    carry["sums"], carry["grads"], d_head = slots.head(step, carry, y, m)
    carry["grads"], dx = slots.backward(step, carry, d_head, t)
    carry["g"] = slots.to_stage(dx, -1)
    return carry, None
