"""Zero-bubble 1F1B: compute some weight gradients where a stage would be idle.

The ticks are those of 1F1B (`runner.py`). A backward at the beginning of a step leaves the factors
of its weight gradients in a buffer, and the stage multiplies them in an idle slot
(`schedules.ZeroBubble`). For stages that choose by a branch what they compute (`BranchedChunks`).
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel import vjp_segments
from jaxpar.parallel.pipeline import slots, stash
from jaxpar.parallel.pipeline.schedules import ZeroBubble
from jaxpar.parallel.staged_model import StagedModel, Sums, float32_zeros, take
from jaxpar.sharding.axes import PIPELINE
from jaxpar.sharding.params import join


def zero_bubble(
    model: StagedModel,
    trainable: Any,
    frozen: Any,
    microbatches: Any,
    scale: jax.Array,
    *,
    save: Literal["residuals", "inputs"],
) -> tuple[Sums, Any]:
    """Compute loss and gradients of a model split into stages over PIPELINE, by zero-bubble 1F1B.

    Args, Returns, Communication: as `runner.one_f_one_b`, with one chunk of layers per stage, and
              a model whose `attach` gives weights the gradients `Factors`.
    """
    weights = join(trainable, frozen)
    step = slots.step_of(
        ZeroBubble, model, weights, microbatches, virtual=1, scale=scale, save=save
    )
    schedule, blank = step.schedule, step.blank()
    carry = dict(
        x=blank,
        g=blank,
        stash=slots.empty_stash(step, blank),
        factors=_empty_factors(step),
        grads=float32_zeros(dict(trainable, layers=step.chunks.sums_like(trainable["layers"]))),
        sums=step.no_loss(),
    )
    carry, _ = lax.scan(partial(_tick, step), carry, jnp.arange(schedule.phases()[-1][-1]))
    grads = carry["grads"]
    return carry["sums"], dict(grads, layers=step.chunks.unstacked(grads["layers"], 1))


def _tick(step: slots.Step, carry: dict, t: jax.Array):
    """Run a forward slot, postponed weight gradients and a backward slot."""
    carry = dict(carry)
    # Both permutes come first: one that came after the forward would end the idle slot of a stage
    # only when its neighbor has finished its own forward.
    carry["x"], carry["g"] = lax.optimization_barrier((carry["x"], carry["g"]))
    y, carry["stash"] = slots.forward(step, carry["x"], t, carry["stash"])
    # Then the weight gradients, before the head, at which the stages wait for each other.
    y, carry["grads"] = lax.optimization_barrier((y, _catch_up(step, carry, t)))
    done = t - (step.schedule.stages - 1)
    carry["sums"], carry["grads"], d_head = slots.head(step, carry, y, done)
    carry["x"] = slots.to_stage(y, 1)
    carry["grads"], carry["factors"], dx = _backward(step, carry, d_head, t)
    carry["g"] = slots.to_stage(dx, -1)
    return carry, None


def _backward(step: slots.Step, carry: dict, d_head: jax.Array, t: jax.Array):
    """Run this stage's backward at tick t, with or without weight gradients."""
    s, schedule, model = lax.axis_index(PIPELINE), _schedule(step), step.model
    action, g = slots.backward_action(step, carry, d_head, t)
    (sums,), factors, chunk = carry["grads"]["layers"], carry["factors"], step.chunks.first

    def whole():
        vjps, context = slots.pullbacks(step, carry["stash"], chunk, action, g)
        own, dx = vjp_segments.backward(model, chunk, sums, vjps, g, context)
        return own, factors, dx

    def postponed():
        vjps, context = slots.pullbacks(step, carry["stash"], chunk, action, g)
        keep = lambda k, values: _put(factors[k], values, action.i)  # noqa: E731
        return vjp_segments.backward_without_factors(model, chunk, sums, vjps, g, context, keep)

    at_work = (action.i >= 0) & (action.i < schedule.num_actions)
    kind = jnp.where(at_work, action.i < schedule.num_postponed(s), 2)
    own, factors, dx = lax.switch(kind, [whole, postponed, lambda: (sums, factors, g)])
    return slots.embed_backward(step, dict(carry["grads"], layers=(own,)), dx, t), factors, dx


def _catch_up(step: slots.Step, carry: dict, t: jax.Array) -> dict:
    """Add the weight gradients that this stage computes in an idle slot of tick t, if any."""
    s, schedule = lax.axis_index(PIPELINE), _schedule(step)
    bounds = schedule.num_caught_up(s, t), schedule.num_caught_up(s, t + 1)

    def add(j: jax.Array, sums: Any):
        return vjp_segments.add_factors(step.model, sums, take(carry["factors"], j))

    (sums,) = carry["grads"]["layers"]
    return dict(carry["grads"], layers=(lax.fori_loop(*bounds, add, sums),))


def _schedule(step: slots.Step) -> ZeroBubble:
    assert isinstance(step.schedule, ZeroBubble)
    return step.schedule


def _put(slots_of: Any, values: Any, j: jax.Array) -> Any:
    write = lambda r, a: lax.dynamic_update_index_in_dim(r, a, j, 0)  # noqa: E731
    return jax.tree.map(write, slots_of, values)


def _empty_factors(step: slots.Step) -> list[Any]:
    """Create a slot for each backward that may postpone its weight gradients."""
    types: list[Any] = []

    def note() -> None:
        for segment in step.model.segments(step.chunks.first):
            attached = vjp_segments.factors_of(step.model.attach(segment))
            types.append(jax.tree.map(jax.typeof, attached))

    jax.eval_shape(note)
    return stash.empty(types, _schedule(step).max_postponed)
