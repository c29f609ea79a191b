"""Traces of training, on a mesh and with a plain model, for `certify` and the tests.

A `TrainingTrace` records a few training steps: initial weights, first gradients, metrics of each
step and the state after it, all as logical arrays on the host. `reference_trace` makes one with
`model/plain` and optax in float64 on a single device, `mesh_trace` with the train step on a mesh.
Batches are random packed documents.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpar.certification import plain_metrics
from jaxpar.components.experts import experts_in
from jaxpar.config import Config, replace
from jaxpar.config.lists.weight_schedules import with_weights_of
from jaxpar.config.schema.features import objective_in
from jaxpar.execution.decisions import execution_of
from jaxpar.functional.plain import loss_of_logical
from jaxpar.functional.sharded import shard_batch
from jaxpar.model.parameters import specs_of, trainable_specs
from jaxpar.model.plain import decoder
from jaxpar.model.plain.feed_forward import router_loss
from jaxpar.objectives.losses import loss_of
from jaxpar.objectives.objective import objective_of
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.sharding.batch import IGNORED, Batch
from jaxpar.sharding.initial_values import init_options, initialize
from jaxpar.sharding.params import flat, join, split
from jaxpar.step.feature import Feature
from jaxpar.step.features import features_of, own_probes, post_updates
from jaxpar.step.features.layer_metrics import every_probe
from jaxpar.step.layer_order import layer_order
from jaxpar.step.state import TrainState, init_state, to_logical, to_running
from jaxpar.step.train_step import (
    GRADIENTS,
    LAYERS,
    make_eval_step,
    make_gradient_step,
    make_train_step,
)


def max_segments(cfg: Config) -> int | None:
    """Return the bound on documents in a row that the steps of random batches need."""
    return objective_of(cfg).documents


type Arrays = dict[str, np.ndarray]

#: Compiler options for simulated devices, where LLVM's optimizations take most of the time.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

#: On GPUs, it is the tuning of matmuls that takes long.
QUICK_ON_GPU = {"xla_gpu_autotune_level": 0}


def compile_options(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Return the compiler options for programs that run a few times."""
    return QUICK_COMPILE if devices[0].platform == "cpu" else QUICK_ON_GPU


#: `jax.jit` for the plain model, which runs on a CPU.
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)

#: In a random batch: the mean number of documents in a sequence, and the share of dropped labels.
DOCUMENTS, DROPPED = 4, 0.05


def random_batch(cfg: Config, index: int = 0) -> Batch:
    """Make a batch of random tokens in packed documents of random length, on the host, in order.

    A function of (train.seed, index). Labels across the end of a document, and a few random ones,
    are IGNORED. Without `data.document_mask`, a sequence is one document. An objective may make
    another one (`Objective.random_batch`).
    """
    of, rng = objective_of(cfg), np.random.default_rng((cfg.train.seed, index))
    B, T = cfg.train.global_batch_size, cfg.data.seq_len
    text = rng.integers(0, cfg.model.vocab_size, (B, T + 1), dtype=np.int32)
    if (made := of.random_batch(cfg, rng, text)) is not None:
        return made
    starts = rng.random((B, T + 1)) < (DOCUMENTS - 1) / T
    if not cfg.data.document_mask:
        starts[:] = False
    starts[:, 0] = True
    place = np.arange(T, dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts[:, :T], place, 0), axis=1)
    dropped = starts[:, 1:] | (rng.random((B, T)) < DROPPED)
    extra = of.random_extra(cfg, rng)
    reads = cfg.train.loss.reads if cfg.train.loss else ()
    if reads:
        sources = rng.integers(0, 2, (B, 1), dtype=np.int32)
        extra |= {"source": np.broadcast_to(sources, (B, T)).copy()}
    return Batch(
        extra=extra,
        tokens=text[:, :T],
        labels=np.where(dropped, np.int32(IGNORED), text[:, 1:]),
        segment_ids=np.cumsum(starts[:, :T], axis=1, dtype=np.int32),
        positions=(place - first).astype(np.int32),
    )


@dataclass(frozen=True)
class TrainingTrace:
    """The record of a few training steps; arrays by name, layers in the model's order."""

    init: Arrays
    loss: float
    """Loss of the first batch, at the initial weights."""
    gradients: Arrays
    losses: list[float]
    """Loss of each training step."""
    params: Arrays
    """Parameters after the last step."""
    probes: Arrays = dataclasses.field(default_factory=dict)
    """Metrics of probes in the first batch."""
    metrics: list[Arrays] = dataclasses.field(default_factory=list)
    """Metrics of each training step; of the first batch without steps."""
    states: dict[int, Arrays] = dataclasses.field(default_factory=dict)
    """What a checkpoint has, after so many updates: "opt_state/0/mu/layers/wq", "ema/embed"."""
    evaluated: float | None = None
    """Loss of the first batch in an evaluation, at the initial weights."""
    rounding: dict[str, float] = dataclasses.field(default_factory=dict)
    """What rounding the weights does to each gradient."""
    same: dict[str, tuple[Arrays, Arrays]] = dataclasses.field(default_factory=dict)
    """What must have the same bits, by what should not change them."""


def reference_trace(
    cfg: Config,
    batches: Sequence[Batch],
    steps: int,
    prepare: Callable[[Config, float], Config] = lambda cfg, _: cfg,
    *,
    moved: bool = False,
) -> TrainingTrace:
    """Train the plain model with `jax.grad` and optax in float64 on one device, one batch per step.

    Args:     batches: at least one; the first gives the gradients. steps: number of steps.
              prepare: (cfg, norm of the first gradient) -> the config of the steps.
              moved: also measure what rounding the weights does to the gradients.
    """
    specs = specs_of(cfg)
    start = initial_params(specs, cfg.train.seed)
    initial = functools.partial(initial_params, seed=cfg.train.seed)
    trainable = split(start, specs)[0]
    extra = {f.name: f.plain_state(cfg, trainable, initial) for f in features_of(cfg)}
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        params, extra = jax.tree.map(_exact, (start, extra))
        return _reference_trace(cfg, batches, steps, prepare, moved, start, params, extra)


def _exact(a: jax.Array) -> jax.Array:
    """Return an array of numbers in float64."""
    return jnp.asarray(np.asarray(a), jnp.float64)


def _reference_trace(
    cfg: Config,
    batches: Any,
    steps: int,
    prepare: Any,
    moved: bool,
    start: Any,
    params: Any,
    extra: Any,
) -> TrainingTrace:
    specs, every = specs_of(cfg), every_probe(cfg)

    @functools.cache
    def gradients(of: Config):
        def both(params, batch):
            loss, grads = reference_gradients(params, batch, of)
            return loss, grads, plain_metrics.before_update(params, grads, batch, of)

        return quick_jit(both)

    first = gradients(with_weights_of(cfg, 0))(params, batches[0])
    loss, grads, metrics = first
    at_start = functools.partial(gradients(with_weights_of(cfg, 0)), batch=batches[0])
    rounding = _rounding(lambda p: at_start(p)[1], params, cfg.train.seed) if moved else {}
    prepared = prepare(cfg, float(metrics["grad_norm"]))
    update, opt_state = _updates(prepared, specs, params)
    probes = quick_jit(lambda params: own_probes.plain(params, batches[0], cfg, every))(params)
    found = [to_host(metrics)] if not steps else []
    states, losses = {}, list[float]()
    for step, batch in enumerate(batches[:steps]):
        if step:
            loss, grads, metrics = gradients(with_weights_of(cfg, step))(params, batch)
        params, opt_state, extra, more = update(grads, opt_state, params, batch, extra, step)
        losses.append(float(loss))
        found.append(to_host(metrics | more))
        if step + 1 in (1, steps):
            states[step + 1] = named({"params": params, "opt_state": opt_state} | extra)
    return TrainingTrace(
        to_host(start),
        float(first[0]),
        to_host(first[1]),
        losses,
        to_host(params),
        to_host(probes),
        metrics=found,
        states=states,
        evaluated=float(first[0]),
        rounding=rounding,
    )


#: How often `_rounding` moves the weights.
SAMPLES = 3


def _rounding(gradients: Callable[[Any], Any], params: Any, seed: int) -> dict[str, float]:
    """Measure what it does to each gradient to move each weight by half an ulp of float32, up or
    down at random: the largest change, relative to the largest value.

    A gradient is a sum over all tokens. Where its terms cancel, as they may for the gain of a norm,
    one rounding of a term can be more than `--tolerance` of the sum, and two correct meshes differ
    by that.
    """
    rng, exact = np.random.default_rng(seed), to_host(gradients(params))
    half_ulp, changes = 2.0**-24, dict.fromkeys(exact, 0.0)
    for _ in range(SAMPLES):
        move = lambda a: a * (1 + half_ulp * rng.choice([-1.0, 1.0], a.shape))  # noqa: E731
        for name, a in to_host(gradients(jax.tree.map(move, params))).items():
            size = np.abs(exact[name]).max()
            change = np.abs(a - exact[name]).max() / size if size else 0.0
            changes[name] = max(changes[name], float(change))
    return changes


def _updates(cfg: Config, specs: Any, params: Any) -> tuple[Any, Any]:
    """Return a compiled update of the plain model, and the initial state of its rule."""
    rule = make_optimizer(cfg.optimizer, cfg.train.num_steps, trainable_specs(cfg))
    limit = cfg.optimizer.clip_norm
    clip = optax.clip_by_global_norm(limit) if limit else optax.identity()

    @quick_jit
    def update(grads, opt_state, params, batch, extra, step):
        trainable, frozen = split(params, specs)
        clipped, _ = clip.update(grads, clip.init(trainable))
        updates, opt_state = rule.update(clipped, opt_state, trainable)
        new = join(optax.apply_updates(trainable, updates), frozen)
        found = features_of(cfg)
        late = sorted((one for one in found if any(_late(one))), key=_late)

        def applied(features: Sequence[Feature], new: Any, extra: Any) -> tuple[Any, Any]:
            for feature in features:
                new, own = feature.plain(new, params, extra[feature.name], step, batch, cfg)
                extra = extra | {feature.name: own}
            return new, extra

        new, extra = applied([one for one in found if one not in late], new, extra)
        of_update = plain_metrics.of_update(split(new, specs)[0], trainable, cfg)
        new, extra = applied(late, new, extra)
        return new, opt_state, extra, plain_metrics.after_update(new, cfg) | of_update

    return update, rule.init(split(params, specs)[0])


def _late(feature: Feature) -> tuple[bool, bool]:
    """Users' post-updates come after other features, before those of the final weights."""
    return feature.of_final_weights, isinstance(feature, post_updates.OwnPostUpdate)


def initial_params(specs: Any, seed: int) -> Any:
    """Initialize parameters on one device: a tree of float32 arrays for a tree of ParamSpec."""
    options = init_options(jax.default_backend())
    return jax.jit(lambda: initialize(specs, seed), compiler_options=dict(options))()


def reference_gradients(params: Any, batch: Batch, cfg: Config) -> tuple[jax.Array, Any]:
    """Compute the plain model's loss (cross entropy alone) and gradients (with every loss).

    Returns:  the loss, and the gradients of the trainable parameters.
    """
    more = ("train.z_loss", "train.balance_loss", "train.router_z_loss", "train.mtp_loss")
    no_more = dict.fromkeys(more, 0.0)
    plain = replace(cfg, **no_more)
    trainable, frozen = split(params, specs_of(cfg))

    of = objective_in(cfg)
    t, m = cfg.train, cfg.model
    of_routers = experts_in(m) and (t.balance_loss or t.router_z_loss)
    has_more = t.z_loss or of_routers or (m.mtp_depth and t.mtp_loss)

    def both(trainable):
        params = join(trainable, frozen)
        if of is not None:
            return objective_loss(params, batch, cfg)
        total = token_loss(params, batch, cfg)
        return total, token_loss(params, batch, plain) if has_more else total

    (_, reported), grads = jax.value_and_grad(both, has_aux=True)(trainable)
    return reported, grads


def objective_loss(params: Any, batch: Batch, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """Compute the plain form of an objective, with the losses of routers, and what is reported."""
    params = decoder.scale_adapters(params, cfg)
    x, routings = decoder.hidden_and_routings(params, batch, cfg)
    logits = decoder.output(x, params, cfg.model)
    total, reported = objective_of(cfg).plain(logits, batch, cfg)
    return total + sum(router_loss(one, cfg) for one in routings), reported


def token_loss(params: Any, batch: Batch, cfg: Config) -> jax.Array:
    """Compute the plain model's loss of tokens."""
    return loss_of_logical(params, batch, cfg, loss_of(cfg))


#: The loss scale of one more step, which must not change a bit.
SCALE = 1024.0


def mesh_trace(
    cfg: Config,
    mesh: Mesh,
    batches: Sequence[Batch],
    steps: int,
    compiler_options: dict[str, Any] | None = None,
    *,
    everything: bool = False,
    changed: Callable[[jax.Array], jax.Array] | None = None,
) -> TrainingTrace:
    """Do the same with the train step on a mesh; `cfg` is resolved for the mesh.

    Args:     everything: also evaluate, keep states, and repeat the first step at a loss scale.
              changed: makes other initial values of each weight.
    """
    ex = dataclasses.replace(execution_of(cfg), scales_loss=True) if everything else None
    state = init_state(cfg, mesh)
    if changed:
        state = dataclasses.replace(state, params=jax.tree.map(changed, state.params))
    start = jax.tree.map(np.array, state), jax.tree.map(lambda a: a.sharding, state)
    init = params = logical(state.params, cfg)
    placed = [shard_batch(batch, cfg, mesh) for batch in batches[: max(steps, 1)]]
    most = max_segments(cfg)

    programs: list[tuple[Any, Any]] = []
    if steps:
        wanted = (GRADIENTS, LAYERS, "expert_rows")
        programs.append((make_train_step(cfg, mesh, most, ex, requested=wanted), state))
    else:
        programs.append((make_gradient_step(cfg, mesh, most, ex), state.params))
    if everything:
        programs.append((make_eval_step(cfg, mesh, most, ex), state.params))
    lowered = [step.lower(first, placed[0]) for step, first in programs]
    with ThreadPoolExecutor(2) as pool:  # most of the time, and on one core each
        step, *evaluation = pool.map(lambda one: one.compile(compiler_options), lowered)

    evaluated = None
    for evaluate in evaluation:
        sums, count = evaluate(state.params, placed[0])
        evaluated = float(np.ravel(sums)[0] / count)
    if not steps:
        measured, grads = step(state.params, placed[0])
    found, states, gradients, same = [], {}, {}, {}
    for i, batch in enumerate(placed[:steps]):
        state, measured = step(state, batch)
        grads = measured.pop(GRADIENTS)
        found.append(to_host(measured))
        if not i:
            gradients = logical(grads, cfg)
        if everything and i + 1 in (1, steps):
            states[i + 1] = named(to_logical(state, cfg).saved)
    if steps:
        params = logical(state.params, cfg)
    else:
        found, gradients = [to_host(measured)], logical(grads, cfg)
    if steps and everything:
        same = _guarded(step, start, placed[0], cfg, found[0] | states[1] | gradients)
        if layer_order(cfg) is not None:
            before = named(state.saved)
            after = named(to_running(to_logical(state, cfg), cfg).saved)
            same["order of layers in a checkpoint, and back"] = (after, before)
    loss, losses = float(found[0]["loss"]), [float(one["loss"]) for one in found]
    probes = {probe.metric: found[0][probe.metric] for probe in every_probe(cfg)}
    return TrainingTrace(
        init,
        loss,
        gradients,
        losses if steps else [],
        params,
        probes,
        metrics=found,
        states=states,
        evaluated=evaluated,
        same=same,
    )


def _guarded(
    step: Any, start: Any, batch: Any, cfg: Config, first: Arrays
) -> dict[str, tuple[Arrays, Arrays]]:
    """Repeat the first step at a loss scale that then grows, and with an overflow, which halves it.

    Args:     start: arrays and shardings of the first state. first: metrics, state and
              gradients of the first step.
    Returns:  pairs for `TrainingTrace.same`.
    """
    same: dict[str, tuple[Arrays, Arrays]] = {}
    last = cfg.guard.loss_scale_interval - 1
    for overflows in (False, True):
        state = jax.device_put(*start)
        if overflows:  # one gradient is NaN, at a scale that can be halved
            top = state.params["final_norm"]
            broken = jax.device_put(np.full(top.shape, np.nan, top.dtype), top.sharding)
            state = dataclasses.replace(state, params=state.params | {"final_norm": broken})
        before, guard = named(to_logical(state, cfg).saved), state.extra["guard"]
        changed = {"loss_scale": np.float32(SCALE), "since_change": np.int32(last)}
        changed = {n: jax.device_put(a, guard[n].sharding) for n, a in changed.items()}
        state, measured = step(state.with_extra(guard=guard | changed), batch)
        grads = logical(measured.pop(GRADIENTS), cfg)
        after = named(to_logical(state, cfg).saved)
        scale = np.array(SCALE / 2 if overflows else 2 * SCALE, np.float32)
        expected = {"guard/loss_scale": scale, "guard/since_change": np.array(0, np.int32)}
        if overflows:
            once = np.array(1, np.int32)
            wanted = before | expected | {"step": once, "guard/skipped": once}
            same["a step that overflows"] = (after, wanted)
        else:
            found = after | to_host(measured) | grads
            del found["loss_scale"]
            wanted = {name: first[name] for name in found} | expected
            same[f"a step at a loss scale of {SCALE:.0f}"] = (found, wanted)
    return same


def logical(tree: Any, cfg: Config) -> Arrays:
    """Return parameters or gradients of a running state on the host, in the model's layer order."""
    return to_host(to_logical(TrainState(0, tree, ()), cfg).params)


def named(tree: Any) -> Arrays:
    """Return the leaves of any tree as numpy arrays by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    path = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return {path(at): np.asarray(a) for at, a in leaves}


def to_host(tree: Any) -> Arrays:
    """Flatten a tree of arrays to numpy arrays by name."""
    return {name: np.asarray(a) for name, a in flat(tree).items()}
