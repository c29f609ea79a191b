"""Microbatches through the model: gradient accumulation, and the 1F1B pipeline.

Both take a `Program`, weights and microbatches, and return summed losses and float32 gradients;
with one stage the pipeline is accumulation. The pipeline's backward is placed by hand with
`jax.vjp`, so nothing differentiates its loops and nothing is saved per tick: memory is flat in the
number of microbatches. Stages differ only by `where` masks. A collective over PIPELINE under a
condition that differs between stages would hang; conditions here depend on the tick alone.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.axes import PIPELINE
from jaxpar.parallel.collectives import shift, varying
from jaxpar.parallel.schedule import Schedule
from jaxpar.params import join

type Sums = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Program:
    """The model as a schedule sees it. `mb` is one microbatch; weights: `top`, a dict, and `chunk`.

    embed   (top, mb) -> x. Every stage calls it together.
    stage   (chunk, x, mb, beside) -> x, beside. The latter: weights that `head` is given, whose
            gradients travel beside the layers' backward.
    head    (top, x, mb) -> (loss, loss to report). Every stage calls it together; reads x on the
            last stage, and sends that stage alone a gradient.
    """

    embed: Callable[..., jax.Array]
    stage: Callable[..., tuple[jax.Array, Any]]
    head: Callable[..., Sums]


@jax.named_scope("between_stages")
def _to_stage(x: jax.Array, step: int) -> jax.Array:
    """An activation, or a gradient, to the stage `step` places on."""
    return shift(x, PIPELINE, step)


def take(tree: Any, i: Any) -> Any:
    """The i-th entry along the leading dim of every array."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def _add32(total: Any, part: Any) -> Any:
    part = _under_names_of(total, part)
    return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, part)


def _under_names_of(total: Any, part: Any) -> Any:
    """What `part` holds under the names of `total`: weights that stand still are none of them."""
    if isinstance(total, tuple):
        return tuple(map(_under_names_of, total, part))
    if isinstance(total, dict):
        return {name: _under_names_of(total[name], part[name]) for name in total}
    return part


def _zeros32(tree: Any) -> Any:
    return varying(jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree))


def whole_model(program: Program, trained: Any, still: Any, mb: Any) -> Sums:
    """Loss of one microbatch on one stage: embed, all layers, head."""
    weights = join(trained, still)
    top, chunk = weights["top"], jax.tree.map(lambda a: a[0], weights["layers"])
    beside = {"head": top["head"]} if "head" in trained["top"] else {}
    x, beside = program.stage(chunk, program.embed(top, mb), mb, beside)
    return program.head(top | beside, x, mb)


def accumulate(program: Program, weights: Any, still: Any, microbatches: Any, scale: jax.Array):
    """Loss and gradients of a model that is not cut into stages.

    Args:     weights: {"top", "layers"}, varying over every axis; layers [1, ...]. still: the
              same, of other names: weights that take no gradient; or {}. microbatches: a Batch of
              [M, ...]. scale: the loss's cotangent, 1 / number of tokens.
    Returns:  (loss sums over the local tokens, gradients like `weights`; float32 when M > 1).
    """

    def gradients(mb):
        sums, vjp = jax.vjp(lambda w: whole_model(program, w, still, mb), weights)
        (grads,) = vjp(_seed(sums, scale))
        return sums, grads

    if len(jax.tree.leaves(microbatches)[0]) == 1:
        return gradients(take(microbatches, 0))

    def body(carry, mb):
        sums, grads = gradients(mb)
        return (jax.tree.map(jnp.add, carry[0], sums), _add32(carry[1], grads)), None

    first = jax.eval_shape(lambda: gradients(take(microbatches, 0))[0])
    start = _zeros_like_type(first), _zeros32(weights)
    return lax.scan(body, start, microbatches)[0]


def _zeros_like_type(avals: Any) -> Any:
    """Zeros of the same shapes, dtypes and varying axes."""

    def zeros(a):
        axes = tuple(sorted(a.manual_axis_type.varying))
        z = jnp.zeros(a.shape, a.dtype)
        return lax.pcast(z, axes, to="varying") if axes else z

    return jax.tree.map(zeros, avals)


def _seed(sums: Sums, scale: jax.Array) -> Sums:
    """Cotangents of (loss, reported loss)."""
    return jnp.ones_like(sums[0]) * scale, jnp.zeros_like(sums[1])


def forward_only(program: Program, weights: Any, microbatches: Any, virtual: int) -> Sums:
    """Loss sums without gradients: for evaluation, with or without stages."""
    P = lax.axis_size(PIPELINE)
    plan = Schedule(P, virtual, len(jax.tree.leaves(microbatches)[0]))
    run = _Run(program, weights, microbatches, plan, None, "inputs")

    def tick(carry, t):
        x, y, _ = _forward(run, carry["x"], t, differentiate=False)
        done = t - (P - 1)
        m, c = plan.forward_unit(jnp.clip(done, 0, plan.num_units - 1))
        ready = (done >= 0) & (done < plan.num_units) & (c == virtual - 1)
        sums = program.head(weights["top"], y, take(microbatches, m))
        add = lambda a, b: a + jnp.where(ready, b, 0)  # noqa: E731
        return dict(x=_to_stage(y, 1), sums=jax.tree.map(add, carry["sums"], sums)), None

    ticks = jnp.arange(plan.num_units + P - 1)
    carry: dict[str, Any] = dict(x=run.blank(), sums=run.no_loss())
    carry, _ = lax.scan(tick, carry, ticks)
    return carry["sums"]


# ----------------------------------------------------------------------------------- 1F1B


@dataclass(frozen=True)
class _Run:
    """What one step's slots share."""

    program: Program
    weights: Any
    microbatches: Any
    plan: Schedule
    scale: Any
    save: Literal["residuals", "inputs"]

    def chunk(self, c: Any) -> Any:
        layers = self.weights["layers"]
        if self.plan.virtual == 1:
            return jax.tree.map(lambda a: a[0], layers)
        return take(layers, c)

    def x_aval(self) -> Any:
        return jax.eval_shape(
            lambda: self.program.embed(self.weights["top"], take(self.microbatches, 0))
        )

    def blank(self) -> jax.Array:
        aval = self.x_aval()
        return varying(jnp.zeros(aval.shape, aval.dtype))

    def no_loss(self) -> Sums:
        top, mb = self.weights["top"], take(self.microbatches, 0)
        return _zeros_like_type(jax.eval_shape(lambda: self.program.head(top, self.blank(), mb)))


def one_f_one_b(
    program: Program,
    weights: Any,
    still: Any,
    microbatches: Any,
    scale: jax.Array,
    *,
    virtual: int,
    save: Literal["residuals", "inputs"],
):
    """Loss and gradients of a model cut into stages over PIPELINE: interleaved 1F1B.

    Args:     weights: {"top", "layers"}, varying over every axis; layers [v, ...], this stage's
              chunks. still: as in `accumulate`. microbatches: a Batch of [M, ...]. scale: the
              loss's cotangent. save: what waits in the ring for the backward: the vjp's own
              residuals under the named remat policy, or chunk inputs, from which the chunk is run
              again.
    Returns:  (loss sums over the local tokens, float32 gradients like `weights`).
    Communication: per tick, a permute of [B, T/(sequence*tensor), D] each way over PIPELINE;
              those of embed and head.
    """
    plan = Schedule(lax.axis_size(PIPELINE), virtual, len(jax.tree.leaves(microbatches)[0]))
    run = _Run(program, join(weights, still), microbatches, plan, scale, save)
    blank = run.blank()
    carry = dict(
        x=blank,
        g=blank,
        ring=_empty_ring(run, blank),
        grads=_zeros32(weights),
        sums=run.no_loss(),
    )
    for forwards, backwards, start, stop in plan.phases():
        tick = functools.partial(_tick, run, forwards, backwards)
        carry, _ = lax.scan(tick, carry, jnp.arange(start, stop))
    return carry["sums"], carry["grads"]


def _tick(run: _Run, forwards: bool, backwards: bool, carry: dict, t: jax.Array):
    """One forward and one backward slot. Both permutes are used a tick later: time to overlap."""
    carry = dict(carry)
    d_head = jnp.zeros_like(carry["x"])
    if forwards:
        x, y, saved = _forward(run, carry["x"], t, differentiate=run.save == "residuals")
        carry["ring"] = _put(run, carry["ring"], saved if run.save == "residuals" else [x], t)
        if backwards:
            carry["sums"], carry["grads"], d_head = _head(run, carry, y, t)
        carry["x"] = _to_stage(y, 1)
    if backwards:
        carry["grads"], dx = _backward(run, carry, d_head, t)
        carry["g"] = _to_stage(dx, -1)
    return carry, None


def _forward(run: _Run, received: jax.Array, t: jax.Array, *, differentiate: bool):
    """This stage's forward unit at tick t: its input, its output, and the vjp's residuals."""
    s, plan = lax.axis_index(PIPELINE), run.plan
    m, c = plan.forward_unit(jnp.clip(t - s, 0, plan.num_units - 1))
    m0, c0 = plan.forward_unit(jnp.clip(t, 0, plan.num_units - 1))
    fresh = _when(
        run,
        (c0 == 0) & (t < plan.num_units),
        lambda: run.program.embed(run.weights["top"], take(run.microbatches, m0)),
        lambda: jnp.zeros_like(received),
    )
    x = jnp.where((s == 0) & (c == 0), fresh, received)
    stage = functools.partial(_stage, run, take(run.microbatches, m))
    if not differentiate:
        return x, stage(run.chunk(c), x), None
    y, vjp = _vjp(stage, run.chunk(c), x)
    return x, y, jax.tree.leaves(vjp)


def _vjp(stage: Callable, chunk: Any, x: jax.Array):
    """`jax.vjp` that holds everything the backward needs but the weights, which stay where they
    are: their places in `args_res` are to be filled in before it is called."""
    return jax.vjp(stage, chunk, x, saveable_args=(False, True))


def _stage(run: _Run, mb: Any, chunk: Any, x: jax.Array) -> jax.Array:
    return run.program.stage(chunk, x, mb, {})[0]


def _when(run: _Run, predicate: jax.Array, yes: Callable, no: Callable) -> Any:
    """`yes()` on the ticks that need it. Without interleaving all do, so there is no branch."""
    return yes() if run.plan.virtual == 1 else lax.cond(predicate, yes, no)


def _head(run: _Run, carry: dict, y: jax.Array, t: jax.Array):
    """Loss of the microbatch that the last stage finished this tick, and its gradients."""
    plan, top = run.plan, run.weights["top"]
    done = t - (plan.stages - 1)
    m, c = plan.forward_unit(jnp.clip(done, 0, plan.num_units - 1))

    def loss():
        mb = take(run.microbatches, m)
        trained = {name: top[name] for name in carry["grads"]["top"]}
        sums, vjp = jax.vjp(lambda w, x: run.program.head(top | w, x, mb), trained, y)
        d_top, dy = vjp(_seed(sums, run.scale))
        grads = dict(carry["grads"], top=_add32(carry["grads"]["top"], d_top))
        return jax.tree.map(jnp.add, carry["sums"], sums), grads, dy

    nothing = lambda: (carry["sums"], carry["grads"], jnp.zeros_like(y))  # noqa: E731
    finished = (done >= 0) & (done < plan.num_units) & (c == plan.virtual - 1)
    return _when(run, finished, loss, nothing)


def _backward(run: _Run, carry: dict, d_head: jax.Array, t: jax.Array):
    """This stage's backward unit at tick t: gradients added up, and the gradient of its input."""
    s, plan = lax.axis_index(PIPELINE), run.plan
    i = t - plan.first_backward - (plan.stages - 1 - s)
    valid = (i >= 0) & (i < plan.num_units)
    m, c, f = plan.backward_unit(jnp.clip(i, 0, plan.num_units - 1))
    last = (s == plan.stages - 1) & (c == plan.virtual - 1)
    g = jnp.where(valid, jnp.where(last, d_head, carry["g"]), 0)
    saved = take(carry["ring"], f % plan.ring_size)
    x = saved[0] if run.save == "inputs" else jnp.zeros_like(g)
    chunk = run.chunk(c)
    _, vjp = _vjp(functools.partial(_stage, run, take(run.microbatches, m)), chunk, x)
    if run.save == "residuals":  # the forward just traced is then dead code; XLA drops it
        vjp = jax.tree.unflatten(jax.tree.structure(vjp), saved)
    vjp.args_res[0] = chunk
    d_chunk, dx = vjp(g)
    grads = dict(carry["grads"], layers=_add_chunk(run, carry["grads"]["layers"], d_chunk, c))
    return _embed_backward(run, grads, dx, t), dx


def _add_chunk(run: _Run, total: Any, part: Any, c: jax.Array) -> Any:
    at = 0 if run.plan.virtual == 1 else c
    add = lambda a, b: a.at[at].add(b.astype(jnp.float32))  # noqa: E731
    return jax.tree.map(add, total, _under_names_of(total, part))


def _embed_backward(run: _Run, grads: dict, dx: jax.Array, t: jax.Array) -> dict:
    """Gradient of the embedding, when the first stage has finished a microbatch's first chunk."""
    plan, top = run.plan, run.weights["top"]
    done = t - plan.first_backward - (plan.stages - 1)
    m, c, _ = plan.backward_unit(jnp.clip(done, 0, plan.num_units - 1))

    def embed():
        mb = take(run.microbatches, m)
        _, vjp = jax.vjp(lambda w: run.program.embed(w, mb), top)
        (d_top,) = vjp(jnp.where(lax.axis_index(PIPELINE) == 0, dx, 0))
        return _add32(grads["top"], d_top)

    finished = (done >= 0) & (done < plan.num_units) & (c == 0)
    return dict(grads, top=_when(run, finished, embed, lambda: grads["top"]))


def _empty_ring(run: _Run, blank: jax.Array) -> Any:
    """Slots for the units in flight, and one more for what no backward will read."""
    types = [jax.typeof(blank)]
    if run.save == "residuals":
        types = _residual_types(run, blank)
    slots = run.plan.ring_size + 1

    def empty(aval: Any) -> jax.Array:
        zeros = varying(jnp.zeros((slots, *aval.shape), aval.dtype))
        # A residual that the remat policy saves in host memory waits there too.
        space = aval.memory_space
        return zeros if space == jax.memory.Space.Device else jax.device_put(zeros, space)

    return [empty(aval) for aval in types]


def _residual_types(run: _Run, x: jax.Array) -> list[Any]:
    """Types of a unit's residuals. (`eval_shape` returns no memory space under shard_map.)"""
    types: list[Any] = []
    stage = functools.partial(_stage, run, take(run.microbatches, 0))

    def note(x: jax.Array) -> None:
        types.extend(map(jax.typeof, jax.tree.leaves(_vjp(stage, run.chunk(0), x)[1])))

    jax.eval_shape(note, x)
    return types


def _put(run: _Run, ring: Any, saved: Any, t: jax.Array) -> Any:
    """Store this tick's forward unit; a tick without one writes to the spare slot."""
    i = t - lax.axis_index(PIPELINE)
    ring_size = run.plan.ring_size
    slot = jnp.where((i >= 0) & (i < run.plan.num_units), i % ring_size, ring_size)
    put = lambda r, a: lax.dynamic_update_index_in_dim(r, a, slot, 0)  # noqa: E731
    return jax.tree.map(put, ring, varying(saved))
