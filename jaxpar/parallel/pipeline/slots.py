"""What a stage of a pipeline does in one tick, in any schedule.

At each tick, a stage has a forward slot, a backward slot or both, as the schedule's loop says
(`runner.py`, `gpipe.py`). Stages differ in their `where` masks and in the chunk that they run
(`chunks.py`). Each backward is called explicitly with `jax.vjp`; nothing differentiates a loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel import vjp_segments
from jaxpar.parallel.collectives import shift, varying
from jaxpar.parallel.pipeline.chunks import Chunks, chunks_of
from jaxpar.parallel.pipeline.schedules import PipelineSchedule
from jaxpar.parallel.staged_model import (
    StagedModel,
    Sums,
    add_gradients,
    float32_zeros,
    seed,
    take,
    zeros_like_type,
)
from jaxpar.sharding.axes import PIPELINE

# ------- The activation stash: values saved by forwards for the backwards of microbatches in flight
#
# Each array has a ring of slots. With `residuals`, the arrays are the residuals of each segment's
# pullback. With `inputs`, the stash holds the chunk's input, and the backward recomputes the chunk.
# The i-th forward writes slot i mod `PipelineSchedule.stash_size`.


def empty(types: Any, num_slots: int) -> Any:
    """Create slots for values of these types.

    Slots on the device are uninitialized, because zeros would be tens of GB to write in every step.
    An idle stage reads the slot of its first or last action, which has been written by then.
    """
    return jax.tree.map(partial(_empty, num_slots), types)


def _empty(num_slots: int, aval: Any) -> jax.Array:
    shape = (num_slots, *aval.shape)
    if aval.memory_space != jax.memory.Space.Device:  # the remat policy saves it on the host
        return jax.device_put(varying(jnp.zeros(shape, aval.dtype)), aval.memory_space)
    return varying(lax.empty(shape, aval.dtype))


def residual_types(vjps_of: Callable[[jax.Array], list[Any]], x: jax.Array) -> list[list[Any]]:
    """Return the types of each pullback's residuals.

    (The result of `eval_shape` would have no memory spaces under `shard_map`.)

    Args:     vjps_of: a chunk's input -> the pullbacks of its segments.
    """
    types: list[list[Any]] = []

    def note(x: jax.Array) -> None:
        for vjp in vjps_of(x):
            types.append(list(map(jax.typeof, jax.tree.leaves(vjp))))

    jax.eval_shape(note, x)
    return types


def put(stash: Any, values: Any, i: jax.Array, schedule: PipelineSchedule, num_slots: int) -> Any:
    """Write the values of the i-th forward. Those of idle stages go to the last slot."""
    valid = (i >= 0) & (i < schedule.num_actions)
    slot = jnp.where(valid, i % schedule.stash_size, num_slots - 1)
    write = lambda r, a: lax.dynamic_update_index_in_dim(r, a, slot, 0)  # noqa: E731
    return jax.tree.map(write, stash, varying(values))


def get(stash: Any, forward: jax.Array, schedule: PipelineSchedule) -> Any:
    """Read the values of a forward, given its index."""
    return take(stash, forward % schedule.stash_size)


# ------------------------------------------------------------------------------ The slots of a tick


@dataclass(frozen=True)
class Step:
    """The values that the ticks of a step share."""

    model: StagedModel
    top: Any
    chunks: Chunks
    microbatches: Any
    schedule: PipelineSchedule
    scale: Any
    save: Literal["residuals", "inputs"]

    @property
    def num_slots(self) -> int:
        """Number of stash slots: the actions in flight, and one for the results of idle stages."""
        return self.schedule.stash_size + (1 if self.model.stage_wide_collectives else 0)

    def blank(self) -> jax.Array:
        """Return zeros like the residual stream."""
        first = take(self.microbatches, 0)
        aval = jax.eval_shape(lambda: self.model.embed(self.top, first))
        return varying(jnp.zeros(aval.shape, aval.dtype))

    def no_loss(self) -> Sums:
        """Return zeros like the loss sums."""
        top, mb = self.top, take(self.microbatches, 0)
        return zeros_like_type(jax.eval_shape(lambda: self.model.head(top, self.blank(), mb)))


def step_of(
    kind: type[PipelineSchedule],
    model: StagedModel,
    weights: Any,
    microbatches: Any,
    *,
    virtual: int,
    scale: Any = None,
    save: Literal["residuals", "inputs"] = "inputs",
) -> Step:
    """Return the values that the ticks of a step share, by a schedule of this kind."""
    M = len(jax.tree.leaves(microbatches)[0])
    schedule = kind(lax.axis_size(PIPELINE), virtual, M)
    chunks = chunks_of(model, weights["layers"], schedule)
    return Step(model, weights["top"], chunks, microbatches, schedule, scale, save)


def empty_carry(step: Step, trainable: Any) -> dict[str, Any]:
    """Return what a stage carries to the first tick of a loop with both slots.

    x, g    zeros: the activation and the gradient that a neighbor sends.
    stash   empty: what forwards leave for backwards.
    grads   float32 zeros like `trainable`, with the layers as the chunks sum them.
    sums    zeros like the loss sums.
    """
    blank = step.blank()
    like_sums = dict(trainable, layers=step.chunks.sums_like(trainable["layers"]))
    return dict(
        x=blank,
        g=blank,
        stash=empty_stash(step, blank),
        grads=float32_zeros(like_sums),
        sums=step.no_loss(),
    )


def results(step: Step, carry: dict[str, Any]) -> tuple[Sums, Any]:
    """Return the loss sums of a carry, and its gradients like the trainable weights."""
    grads = carry["grads"]
    layers = step.chunks.unstacked(grads["layers"], step.schedule.virtual)
    return carry["sums"], dict(grads, layers=layers)


@jax.named_scope("between_stages")
def to_stage(x: jax.Array, step: int) -> jax.Array:
    """Send an activation or a gradient to the stage `step` places further along."""
    return shift(x, PIPELINE, step)


def forward(step: Step, received: jax.Array, t: jax.Array, saved: Any):
    """Run this stage's forward at tick t. Return its output and the updated stash.

    Args:     saved: the stash, or None if there is no backward.
    """
    s, schedule, model = lax.axis_index(PIPELINE), step.schedule, step.model
    i = t - s
    m, c = schedule.forward_action(jnp.clip(i, 0, schedule.num_actions - 1))
    m0, c0 = schedule.forward_action(jnp.clip(t, 0, schedule.num_actions - 1))
    fresh = _when(
        step,
        (c0 == 0) & (t < schedule.num_actions),
        lambda: model.embed(step.top, take(step.microbatches, m0)),
        lambda: jnp.zeros_like(received),
    )
    x = jnp.where((s == 0) & (c == 0), fresh, received)
    context = model.context(take(step.microbatches, m))

    def action(chunk: Any, _: Any):
        if saved is None or step.save == "inputs":
            y = model.stage(chunk, x, context, {})[0]
            return y, saved if saved is None else [_put(step, saved[0], [x], i)]
        y, written = x, list[Any]()
        for k, (segment, slots) in enumerate(zip(model.segments(chunk), saved, strict=True)):
            if written:  # XLA would keep all segments' values until the end and write them there
                segment, written[-1] = lax.optimization_barrier((segment, written[-1]))
            y, vjp = vjp_segments.pullback(model, k, segment, y, context)
            written.append(_put(step, slots, jax.tree.leaves(vjp), i))
        return y, written

    return step.chunks.run(i, c, action, lambda: (x, saved))


def _put(step: Step, slots: Any, values: Any, i: jax.Array) -> Any:
    return put(slots, values, i, step.schedule, step.num_slots)


def _when(step: Step, predicate: jax.Array, yes: Callable, no: Callable) -> Any:
    """Return `yes()` at the ticks that need it, else `no()`.

    If the schedule's loops contain only ticks that need it, stage-wide ones have no branch.
    """
    every = step.schedule.only_needed_ticks and step.model.stage_wide_collectives
    return yes() if every else lax.cond(predicate, yes, no)


def head(step: Step, carry: dict, y: jax.Array, done: jax.Array):
    """Compute loss and gradients of a microbatch from the last stage's output.

    Args:     done: index of the last stage's forward action. Outside [0, num_actions), and for an
              earlier chunk, there is nothing to compute.
    Returns:  (loss sums, gradient sums, gradient of y).
    """
    schedule, top = step.schedule, step.top
    m, c = schedule.forward_action(jnp.clip(done, 0, schedule.num_actions - 1))

    def loss():
        mb = take(step.microbatches, m)
        trainable = {name: top[name] for name in carry["grads"]["top"]}
        sums, vjp = jax.vjp(lambda w, x: step.model.head(top | w, x, mb), trainable, y)
        d_top, dy = vjp(seed(sums, step.scale))
        grads = dict(carry["grads"], top=add_gradients(carry["grads"]["top"], d_top))
        return jax.tree.map(jnp.add, carry["sums"], sums), grads, dy

    nothing = lambda: (carry["sums"], carry["grads"], jnp.zeros_like(y))  # noqa: E731
    finished = (done >= 0) & (done < schedule.num_actions) & (c == schedule.virtual - 1)
    return _when(step, finished, loss, nothing)


def backward(step: Step, carry: dict, d_head: jax.Array, t: jax.Array):
    """Run this stage's backward at tick t. Return gradient sums and the gradient of its input."""
    model, sums = step.model, carry["grads"]["layers"]
    action_of, g = backward_action(step, carry, d_head, t)
    valid = (action_of.i >= 0) & (action_of.i < step.schedule.num_actions)

    def action(chunk: Any, k: Any):
        vjps, context = pullbacks(step, carry["stash"], chunk, action_of, g)
        made = step.chunks.backward(sums, vjps, g, context, chunk, k)
        if not (model.adds_gradients and model.stage_wide_collectives):
            return made  # of an idle slot: not called, or linear in a g of 0
        return jax.tree.map(lambda a, b: jnp.where(valid, a, b), made, (sums, jnp.zeros_like(g)))

    layers, dx = step.chunks.run(action_of.i, action_of.chunk, action, lambda: (sums, g))
    return embed_backward(step, dict(carry["grads"], layers=layers), dx, t), dx


class BackwardAction(NamedTuple):
    """A backward of this stage, as traced int32 scalars. In an idle slot, `i` is out of range."""

    i: jax.Array
    microbatch: jax.Array
    chunk: jax.Array
    forward: jax.Array


def backward_action(step: Step, carry: dict, d_head: jax.Array, t: jax.Array):
    """Return this stage's backward at tick t, and the gradient of its output."""
    s, schedule = lax.axis_index(PIPELINE), step.schedule
    i = t - schedule.first_backward - (schedule.stages - 1 - s)
    valid = (i >= 0) & (i < schedule.num_actions)
    m, c, f = schedule.backward_action(jnp.clip(i, 0, schedule.num_actions - 1))
    last = (s == schedule.stages - 1) & (c == schedule.virtual - 1)
    g = jnp.where(valid, jnp.where(last, d_head, carry["g"]), 0)
    return BackwardAction(i, m, c, f), g


def pullbacks(step: Step, stashed: Any, chunk: Any, action: BackwardAction, g: jax.Array):
    """Return the pullbacks of a chunk's segments, with what its forward saved, and the context."""
    model, saved = step.model, get(stashed, action.forward, step.schedule)
    x = saved[0][0] if step.save == "inputs" else jnp.zeros_like(g)
    context = model.context(take(step.microbatches, action.microbatch))
    _, vjps = vjp_segments.forward(model, chunk, x, context)
    if step.save == "residuals":  # the forward traced above is dead code that XLA removes
        with_saved = lambda vjp, a: jax.tree.unflatten(jax.tree.structure(vjp), a)  # noqa: E731
        vjps = list(map(with_saved, vjps, saved))
    return vjps, context


def embed_backward(step: Step, grads: dict, dx: jax.Array, t: jax.Array) -> dict:
    """Add the embedding's gradient once the first stage has finished a microbatch's first chunk."""
    schedule, top = step.schedule, step.top
    done = t - schedule.first_backward - (schedule.stages - 1)
    m, c, _ = schedule.backward_action(jnp.clip(done, 0, schedule.num_actions - 1))

    def embed():
        mb = take(step.microbatches, m)
        _, vjp = jax.vjp(lambda w: step.model.embed(w, mb), top)
        (d_top,) = vjp(jnp.where(lax.axis_index(PIPELINE) == 0, dx, 0))
        return add_gradients(grads["top"], d_top)

    finished = (done >= 0) & (done < schedule.num_actions) & (c == 0)
    return dict(grads, top=_when(step, finished, embed, lambda: grads["top"]))


def empty_stash(step: Step, blank: jax.Array) -> Any:
    """Create slots for the residuals of each segment of a chunk, or for the chunk's input."""
    if step.save == "inputs":
        return empty([[jax.typeof(blank)]], step.num_slots)
    context = step.model.context(take(step.microbatches, 0))
    vjps_of = lambda x: vjp_segments.forward(step.model, step.chunks.first, x, context)[1]  # noqa: E731
    return empty(residual_types(vjps_of, blank), step.num_slots)
