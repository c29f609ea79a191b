"""Zero-bubble 1F1B: compute some weight gradients where a stage would be idle.

The ticks are those of interleaved 1F1B (`runner.py`). The first backwards of a step leave the
factors of their weight gradients in a buffer, and the stage multiplies them in idle slots
(`schedules.ZeroBubble`). For stages that choose by a branch what they compute (`BranchedChunks`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel import vjp_segments
from jaxpar.parallel.pipeline import slots
from jaxpar.parallel.pipeline.chunks import BranchedChunks
from jaxpar.parallel.pipeline.schedules import ZeroBubble
from jaxpar.parallel.staged_model import StagedModel, Sums, take
from jaxpar.sharding.axes import PIPELINE
from jaxpar.sharding.params import join


def zero_bubble(
    model: StagedModel,
    trainable: Any,
    frozen: Any,
    microbatches: Any,
    scale: jax.Array,
    *,
    virtual: int,
    save: Literal["residuals", "inputs"],
) -> tuple[Sums, Any]:
    """Compute loss and gradients of a model split into stages over PIPELINE, by zero-bubble 1F1B.

    Args, Returns, Communication: as `runner.one_f_one_b`, with a model whose `attach` gives weights
              the gradients `Factors`.
    """
    weights = join(trainable, frozen)
    step = slots.step_of(
        ZeroBubble, model, weights, microbatches, virtual=virtual, scale=scale, save=save
    )
    carry = dict(slots.empty_carry(step, trainable), factors=_empty_factors(step))
    carry, _ = lax.scan(partial(_tick, step), carry, jnp.arange(step.schedule.phases()[-1][-1]))
    return slots.results(step, carry)


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
    sums, factors, chunks = carry["grads"]["layers"], carry["factors"], _chunks(step)

    def whole(c: int):
        vjps, context = slots.pullbacks(step, carry["stash"], chunks[c], action, g)
        own, dx = vjp_segments.backward(model, chunks[c], sums[c], vjps, g, context)
        return _replaced(sums, c, own), factors, dx

    def postponed(c: int):
        vjps, context = slots.pullbacks(step, carry["stash"], chunks[c], action, g)
        keep = lambda k, values: _put(factors[k], values, action.i)  # noqa: E731
        own, kept, dx = vjp_segments.backward_without_factors(
            model, chunks[c], sums[c], vjps, g, context, keep
        )
        return _replaced(sums, c, own), kept, dx

    postponing = schedule.postponing_chunks
    branches: list[Callable] = [partial(whole, c) for c in range(schedule.virtual)]
    branches += [partial(postponed, c) for c in postponing]
    branches.append(lambda: (sums, factors, g))
    later = schedule.virtual + action.chunk - postponing.start
    kind = jnp.where(action.i < schedule.num_postponed(s), later, action.chunk)
    at_work = (action.i >= 0) & (action.i < schedule.num_actions)
    layers, factors, dx = lax.switch(jnp.where(at_work, kind, len(branches) - 1), branches)
    return slots.embed_backward(step, dict(carry["grads"], layers=layers), dx, t), factors, dx


def _catch_up(step: slots.Step, carry: dict, t: jax.Array) -> dict:
    """Add the weight gradients that this stage computes in an idle slot of tick t, if any."""
    s, schedule = lax.axis_index(PIPELINE), _schedule(step)
    bounds = schedule.num_caught_up(s, t), schedule.num_caught_up(s, t + 1)

    def add(c: int, j: jax.Array, layers: Any):
        own = vjp_segments.add_factors(step.model, layers[c], take(carry["factors"], j))
        return _replaced(layers, c, own)

    def one(j: jax.Array, layers: Any):
        _, c, _ = schedule.backward_action(j)
        postponing = schedule.postponing_chunks
        branches = [partial(add, c) for c in postponing]
        return lax.switch(c - postponing.start, branches, j, layers)

    return dict(carry["grads"], layers=lax.fori_loop(*bounds, one, carry["grads"]["layers"]))


def _replaced(layers: tuple, c: int, own: Any) -> tuple:
    return (*layers[:c], own, *layers[c + 1 :])


def _chunks(step: slots.Step) -> tuple:
    assert isinstance(step.chunks, BranchedChunks)
    return step.chunks.weights


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
        for i, segment in enumerate(step.model.segments(step.chunks.first)):
            attached = step.model.attach(segment, i * step.model.layers_per_vjp)
            attached = vjp_segments.factors_of(attached)
            types.append(jax.tree.map(jax.typeof, attached))

    jax.eval_shape(note)
    return slots.empty(types, _schedule(step).max_postponed)
