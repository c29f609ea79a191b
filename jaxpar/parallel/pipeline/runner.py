"""Microbatches through a model that is cut into stages over PIPELINE: interleaved 1F1B.

Takes a `StagedModel`, weights and microbatches, and returns summed losses and float32 gradients. The
backward is placed by hand with `jax.vjp`, so nothing differentiates the loops and nothing is saved
per tick: memory is flat in the number of microbatches.

Stages differ by `where` masks, and by the chunk that they are at. Where a chunk sends nothing, or
over tensor alone by all-to-alls, whose groups lie within a stage, it is chosen by a branch around
all that it computes: matmuls then read its weights, and add to their gradients, where they lie, and
a stage without a unit rests. Where it sends keys and values or weights, every stage must come to
every collective, since XLA brings together all devices of a program for a permute (for weights,
which none carries, branches were not tried): then chunks lie in stacked arrays, an index chooses
the weights, as a copy, and masks hide what a stage without a unit computes.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.accumulation import (
    StagedModel,
    Sums,
    add32,
    add_in_parts,
    forward_in_parts,
    pullback,
    pulled_back,
    seed,
    take,
    zeros32,
    zeros_like_type,
)
from jaxpar.parallel.collectives import shift, varying
from jaxpar.parallel.pipeline.schedules import Schedule
from jaxpar.sharding.axes import PIPELINE
from jaxpar.sharding.params import join


@jax.named_scope("between_stages")
def _to_stage(x: jax.Array, step: int) -> jax.Array:
    """An activation, or a gradient, to the stage `step` places on."""
    return shift(x, PIPELINE, step)


def forward_only(program: StagedModel, weights: Any, microbatches: Any, virtual: int) -> Sums:
    """Loss sums without gradients: for evaluation, with or without stages."""
    run = _run_of(program, weights, microbatches, virtual, None, "inputs")
    plan, P = run.plan, run.plan.stages

    def tick(carry, t):
        y, _ = _forward(run, carry["x"], t, None)
        done = t - (P - 1)
        m, c = plan.forward_action(jnp.clip(done, 0, plan.num_actions - 1))
        ready = (done >= 0) & (done < plan.num_actions) & (c == virtual - 1)

        def with_loss():  # all stages come to it, on the same ticks
            sums = program.head(run.top, y, take(microbatches, m))
            return jax.tree.map(jnp.add, carry["sums"], sums)

        # Without stages every tick is ready, and a branch would hold up what the head gathers.
        sums = with_loss() if P == 1 else lax.cond(ready, with_loss, lambda: carry["sums"])
        return dict(x=_to_stage(y, 1), sums=sums), None

    ticks = jnp.arange(plan.num_actions + P - 1)
    carry: dict[str, Any] = dict(x=run.blank(), sums=run.no_loss())
    carry, _ = lax.scan(tick, carry, ticks)
    return carry["sums"]


# ----------------------------------------------------------------------------------- 1F1B


@dataclass(frozen=True)
class _Run:
    """What one step's slots share."""

    program: StagedModel
    top: Any
    chunks: Any
    """Weights of the stage's chunks: a tuple, or stacked (`by_index`)."""
    microbatches: Any
    plan: Schedule
    scale: Any
    save: Literal["residuals", "inputs"]

    @property
    def by_index(self) -> bool:
        """Whether the chunks lie in stacked arrays, each of which is at an index."""
        return self.program.sends and self.plan.virtual > 1

    def in_chunk(self, unit: jax.Array, c: jax.Array, fn: Callable, idle: Callable) -> Any:
        """`fn(weights of chunk c, c)`; the number as a Python int, unless it is an index.

        Args:     c: every stage has its own. idle: called where there is no such unit; or `fn` is,
                  if chunks send, and what comes of it is for masks to hide.
        """
        if self.by_index:
            return fn(take(self.chunks, c), c)
        if self.program.sends:
            return fn(self.chunks[0], 0)
        work = [partial(fn, chunk, k) for k, chunk in enumerate(self.chunks)]
        at_work = (unit >= 0) & (unit < self.plan.num_actions)
        return lax.switch(jnp.where(at_work, c, len(work)), [*work, idle])

    def add_chunk(self, sums: Any, vjps: list[Any], g: jax.Array, tokens: Any, chunk: Any, c: Any):
        """Sums of all chunks like `chunks`, and chunk c's gradients more; that of its input."""
        if not self.by_index:
            own, dx = add_in_parts(self.program, chunk, sums[c], vjps, g, tokens)
            return (*sums[:c], own, *sums[c + 1 :]), dx
        d_chunk, dx = pulled_back(self.program, chunk, vjps[0], g, tokens)
        return add32(sums, d_chunk, lambda a, b: a.at[c].add(b.astype(jnp.float32))), dx

    @property
    def slots(self) -> int:
        """Of the ring: the units in flight, and one for what no backward will read."""
        return self.plan.stash_size + self.program.sends

    def blank(self) -> jax.Array:
        first = take(self.microbatches, 0)
        aval = jax.eval_shape(lambda: self.program.embed(self.top, first))
        return varying(jnp.zeros(aval.shape, aval.dtype))

    def no_loss(self) -> Sums:
        top, mb = self.top, take(self.microbatches, 0)
        return zeros_like_type(jax.eval_shape(lambda: self.program.head(top, self.blank(), mb)))


def _run_of(program, weights, microbatches, virtual, scale, save) -> _Run:
    M = len(jax.tree.leaves(microbatches)[0])
    plan, chunks = Schedule(lax.axis_size(PIPELINE), virtual, M), weights["layers"]
    run = _Run(program, weights["top"], chunks, microbatches, plan, scale, save)
    return dataclasses.replace(run, chunks=_stacked(chunks)) if run.by_index else run


def _stacked(chunks: tuple) -> Any:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *chunks)


def one_f_one_b(
    program: StagedModel,
    weights: Any,
    still: Any,
    microbatches: Any,
    scale: jax.Array,
    *,
    virtual: int,
    save: Literal["residuals", "inputs"],
):
    """Loss and gradients of a model cut into stages over PIPELINE: interleaved 1F1B.

    Args:     weights: {"top", "layers"}, varying over every axis; layers a tuple of this stage's v
              chunks. still: as in `accumulate`. microbatches: a Batch of [M, ...]. scale: the
              loss's cotangent. save: what waits in the ring for the backward: the vjp's own
              residuals under the named remat policy, or chunk inputs, from which the chunk is run
              again.
    Returns:  (loss sums over the local tokens, float32 gradients like `weights`).
    Communication: per tick, a permute of [B, T/(sequence*tensor), D] each way over PIPELINE;
              those of embed and head.
    """
    run = _run_of(program, join(weights, still), microbatches, virtual, scale, save)
    plan, blank = run.plan, run.blank()
    like_chunks = _stacked(weights["layers"]) if run.by_index else weights["layers"]
    carry = dict(
        x=blank,
        g=blank,
        ring=_empty_ring(run, blank),
        grads=zeros32(dict(weights, layers=like_chunks)),
        sums=run.no_loss(),
    )
    # Where stages rest, one loop does it, compiled once.
    phases = plan.phases() if program.sends else ((True, True, 0, plan.phases()[-1][-1]),)
    for forwards, backwards, start, stop in phases:
        tick = partial(_tick, run, forwards, backwards)
        carry, _ = lax.scan(tick, carry, jnp.arange(start, stop))
    grads = carry["grads"]
    if run.by_index:
        grads = dict(grads, layers=tuple(take(grads["layers"], k) for k in range(virtual)))
    return carry["sums"], grads


def _tick(run: _Run, forwards: bool, backwards: bool, carry: dict, t: jax.Array):
    """One forward and one backward slot. Both permutes are used a tick later: time to overlap."""
    carry = dict(carry)
    d_head = jnp.zeros_like(carry["x"])
    if forwards:
        y, carry["ring"] = _forward(run, carry["x"], t, carry["ring"])
        if backwards:
            carry["sums"], carry["grads"], d_head = _head(run, carry, y, t)
        carry["x"] = _to_stage(y, 1)
    if backwards:
        carry["grads"], dx = _backward(run, carry, d_head, t)
        carry["g"] = _to_stage(dx, -1)
    return carry, None


def _forward(run: _Run, received: jax.Array, t: jax.Array, ring: Any):
    """This stage's forward unit at tick t: its output, and the ring with what its backward needs.

    Args:     ring: None for the output alone.
    """
    s, plan = lax.axis_index(PIPELINE), run.plan
    i = t - s
    m, c = plan.forward_action(jnp.clip(i, 0, plan.num_actions - 1))
    m0, c0 = plan.forward_action(jnp.clip(t, 0, plan.num_actions - 1))
    fresh = _when(
        run,
        (c0 == 0) & (t < plan.num_actions),
        lambda: run.program.embed(run.top, take(run.microbatches, m0)),
        lambda: jnp.zeros_like(received),
    )
    x = jnp.where((s == 0) & (c == 0), fresh, received)
    tokens = run.program.tokens(take(run.microbatches, m))

    def unit(chunk: Any, _: Any):
        if ring is None or run.save == "inputs":
            y = run.program.stage(chunk, x, tokens, {})[0]
            return y, ring if ring is None else [_put(run, ring[0], [x], i)]
        y, kept = x, list[Any]()
        for part, slots in zip(run.program.parts(chunk), ring, strict=True):
            if kept:  # XLA would write all parts' values at the end, and hold them until then
                part, kept[-1] = lax.optimization_barrier((part, kept[-1]))
            y, vjp = pullback(run.program, part, y, tokens)
            kept.append(_put(run, slots, jax.tree.leaves(vjp), i))
        return y, kept

    return run.in_chunk(i, c, unit, lambda: (x, ring))


def _when(run: _Run, predicate: jax.Array, yes: Callable, no: Callable) -> Any:
    """`yes()` on the ticks that need it: in loops of their own and without interleaving all."""
    every = run.plan.virtual == 1 and run.program.sends
    return yes() if every else lax.cond(predicate, yes, no)


def _head(run: _Run, carry: dict, y: jax.Array, t: jax.Array):
    """Loss of the microbatch that the last stage finished this tick, and its gradients."""
    plan, top = run.plan, run.top
    done = t - (plan.stages - 1)
    m, c = plan.forward_action(jnp.clip(done, 0, plan.num_actions - 1))

    def loss():
        mb = take(run.microbatches, m)
        trained = {name: top[name] for name in carry["grads"]["top"]}
        sums, vjp = jax.vjp(lambda w, x: run.program.head(top | w, x, mb), trained, y)
        d_top, dy = vjp(seed(sums, run.scale))
        grads = dict(carry["grads"], top=add32(carry["grads"]["top"], d_top))
        return jax.tree.map(jnp.add, carry["sums"], sums), grads, dy

    nothing = lambda: (carry["sums"], carry["grads"], jnp.zeros_like(y))  # noqa: E731
    finished = (done >= 0) & (done < plan.num_actions) & (c == plan.virtual - 1)
    return _when(run, finished, loss, nothing)


def _backward(run: _Run, carry: dict, d_head: jax.Array, t: jax.Array):
    """This stage's backward unit at tick t: gradients added up, and the gradient of its input."""
    s, plan = lax.axis_index(PIPELINE), run.plan
    i = t - plan.first_backward - (plan.stages - 1 - s)
    valid = (i >= 0) & (i < plan.num_actions)
    m, c, f = plan.backward_action(jnp.clip(i, 0, plan.num_actions - 1))
    last = (s == plan.stages - 1) & (c == plan.virtual - 1)
    g = jnp.where(valid, jnp.where(last, d_head, carry["g"]), 0)
    sums = carry["grads"]["layers"]

    def unit(chunk: Any, k: Any):
        saved = take(carry["ring"], f % plan.stash_size)
        x = saved[0][0] if run.save == "inputs" else jnp.zeros_like(g)
        tokens = run.program.tokens(take(run.microbatches, m))
        _, vjps = forward_in_parts(run.program, chunk, x, tokens)
        if run.save == "residuals":  # the forward just traced is then dead code; XLA drops it
            with_saved = lambda vjp, a: jax.tree.unflatten(jax.tree.structure(vjp), a)  # noqa: E731
            vjps = list(map(with_saved, vjps, saved))
        return run.add_chunk(sums, vjps, g, tokens, chunk, k)

    layers, dx = run.in_chunk(i, c, unit, lambda: (sums, g))
    return _embed_backward(run, dict(carry["grads"], layers=layers), dx, t), dx


def _embed_backward(run: _Run, grads: dict, dx: jax.Array, t: jax.Array) -> dict:
    """Gradient of the embedding, when the first stage has finished a microbatch's first chunk."""
    plan, top = run.plan, run.top
    done = t - plan.first_backward - (plan.stages - 1)
    m, c, _ = plan.backward_action(jnp.clip(done, 0, plan.num_actions - 1))

    def embed():
        mb = take(run.microbatches, m)
        _, vjp = jax.vjp(lambda w: run.program.embed(w, mb), top)
        (d_top,) = vjp(jnp.where(lax.axis_index(PIPELINE) == 0, dx, 0))
        return add32(grads["top"], d_top)

    finished = (done >= 0) & (done < plan.num_actions) & (c == 0)
    return dict(grads, top=_when(run, finished, embed, lambda: grads["top"]))


def _empty_ring(run: _Run, blank: jax.Array) -> Any:
    """Slots for the values of each part of a chunk; for its input, as those of one part."""
    types = _residual_types(run, blank) if run.save == "residuals" else [[jax.typeof(blank)]]
    return jax.tree.map(partial(_empty, run), types)


def _empty(run: _Run, aval: Any) -> jax.Array:
    """Slots for values like `aval`. On the device they begin as memory is found, since zeros are
    tens of GB that every step would write: a stage without a unit reads the slot of its first or
    its last, which has been written by then."""
    shape = (run.slots, *aval.shape)
    if aval.memory_space != jax.memory.Space.Device:  # saved there by the remat policy
        return jax.device_put(varying(jnp.zeros(shape, aval.dtype)), aval.memory_space)
    return varying(lax.empty(shape, aval.dtype))


def _residual_types(run: _Run, x: jax.Array) -> list[list[Any]]:
    """Types of a unit's residuals. (`eval_shape` returns no memory space under shard_map.)"""
    types: list[list[Any]] = []
    tokens = run.program.tokens(take(run.microbatches, 0))

    def note(x: jax.Array) -> None:
        chunk = take(run.chunks, 0) if run.by_index else run.chunks[0]
        for vjp in forward_in_parts(run.program, chunk, x, tokens)[1]:
            types.append(list(map(jax.typeof, jax.tree.leaves(vjp))))

    jax.eval_shape(note, x)
    return types


def _put(run: _Run, ring: Any, saved: Any, i: jax.Array) -> Any:
    """Store what the backward of the i-th forward unit needs; without such a unit, in the last."""
    valid = (i >= 0) & (i < run.plan.num_actions)
    slot = jnp.where(valid, i % run.plan.stash_size, run.slots - 1)
    put = lambda r, a: lax.dynamic_update_index_in_dim(r, a, slot, 0)  # noqa: E731
    return jax.tree.map(put, ring, varying(saved))
