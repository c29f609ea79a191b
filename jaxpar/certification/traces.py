"""Traces of training, on a mesh and with a plain model, for `certify` and the tests.

A `TrainingTrace` records a few training steps: initial weights, first gradients, the loss of each
step and the final weights, all as logical arrays on the host. `reference_trace` makes one with
`model/plain` and optax on a single device, `mesh_trace` with the train step on a mesh. Batches are
random packed documents.
"""

import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpar.components.experts import experts_in
from jaxpar.config import Config, replace
from jaxpar.config.lists.weight_schedules import with_weights_of
from jaxpar.functional.plain import loss_of_logical
from jaxpar.functional.sharded import shard_batch
from jaxpar.model.parameters import specs_of, trainable_specs
from jaxpar.objectives.losses import loss_of
from jaxpar.objectives.reference import distillation_losses, preference_loss
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.sharding.batch import IGNORED, Batch
from jaxpar.sharding.initial_values import init_options, initialize
from jaxpar.sharding.params import flat, join, split
from jaxpar.step.features import features_of, own_probes, post_updates
from jaxpar.step.features.layer_metrics import every_probe
from jaxpar.step.state import TrainState, init_state, to_logical
from jaxpar.step.train_step import make_gradient_step, make_train_step

# ----------------------- Random batches of packed pairs of responses, for `certify` and the tests


#: Most pairs in a row of a random batch, and the share of tokens that belong to prompts.
PAIRS, PROMPTS = 2, 0.3


def max_segments(cfg: Config) -> int | None:
    """Return the bound on documents in a row that the steps of random batches need."""
    return 2 * PAIRS if cfg.dpo else None


def random_pairs(cfg: Config, index: int = 0) -> Batch:
    """Make a batch of one or two pairs a row, of random lengths, on the host, in text order.

    A function of (train.seed, index). Some labels are IGNORED, as those of prompts are, and the
    log probabilities of the reference are random.
    """
    rng = np.random.default_rng((cfg.train.seed, index))
    shape = B, T = cfg.train.global_batch_size, cfg.data.seq_len
    text = rng.integers(0, cfg.model.vocab_size, (B, T + 1), dtype=np.int32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row in range(B):
        cuts = rng.choice(np.arange(1, T), 2 * (1 + row % PAIRS) - 1, replace=False)
        for document, start in enumerate([0, *sorted(cuts.tolist())]):
            segments[row, start:] = document + 1
            positions[row, start:] = np.arange(T - start)
    last = np.diff(segments, axis=1, append=-1) != 0
    spared = last | (rng.random(shape) < PROMPTS)
    labels = np.where(spared, np.int32(IGNORED), text[:, 1:])
    scores = np.where(spared, 0, -2 * rng.random(shape)).astype(np.float32)
    return Batch(text[:, :T], labels, segments, positions, scores)


type Arrays = dict[str, np.ndarray]

#: Compiler options for simulated devices, where LLVM's optimizations take most of the time.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

#: In a random batch: the mean number of documents in a sequence, and the share of dropped labels.
DOCUMENTS, DROPPED = 4, 0.05


def random_batch(cfg: Config, index: int = 0) -> Batch:
    """Make a batch of random tokens in packed documents of random length, on the host, in order.

    A function of (train.seed, index). Labels across the end of a document, and a few random ones,
    are IGNORED. Without `data.document_mask`, a sequence is one document. With `dpo.beta`, they are
    pairs of responses.
    """
    if cfg.dpo:
        return random_pairs(cfg, index)
    rng = np.random.default_rng((cfg.train.seed, index))
    B, T = cfg.train.global_batch_size, cfg.data.seq_len
    text = rng.integers(0, cfg.model.vocab_size, (B, T + 1), dtype=np.int32)
    starts = rng.random((B, T + 1)) < (DOCUMENTS - 1) / T
    if not cfg.data.document_mask:
        starts[:] = False
    starts[:, 0] = True
    place = np.arange(T, dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts[:, :T], place, 0), axis=1)
    dropped = starts[:, 1:] | (rng.random((B, T)) < DROPPED)
    taught = random_teacher(cfg, rng, cfg.distill.top_k) if cfg.distill else {}
    reads = cfg.train.loss.reads if cfg.train.loss else ()
    sources = rng.integers(0, 2, (B, 1), dtype=np.int32) if reads else None
    return Batch(
        **taught,
        extra={} if sources is None else {"source": np.broadcast_to(sources, (B, T)).copy()},
        tokens=text[:, :T],
        labels=np.where(dropped, np.int32(IGNORED), text[:, 1:]),
        segment_ids=np.cumsum(starts[:, :T], axis=1, dtype=np.int32),
        positions=(place - first).astype(np.int32),
    )


def random_teacher(cfg: Config, rng: np.random.Generator, k: int) -> dict[str, np.ndarray]:
    """Make the k likeliest tokens of a random teacher, as fields of a batch."""
    shape = (cfg.train.global_batch_size, cfg.data.seq_len, cfg.model.vocab_size)
    logits = 2 * rng.standard_normal(shape)
    scores = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    ids = np.argsort(-scores, axis=-1)[..., :k].astype(np.int32)
    likeliest = np.take_along_axis(scores, ids, axis=-1).astype(np.float32)
    return {"teacher_ids": ids, "teacher_scores": likeliest}


@dataclass(frozen=True)
class TrainingTrace:
    """The record of a few training steps; arrays by parameter name."""

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


def reference_trace(cfg: Config, batches: Sequence[Batch], steps: int) -> TrainingTrace:
    """Train the plain model with `jax.grad` and optax on one device, one batch per step.

    Args:     batches: at least one; the first gives the gradients. steps: number of steps.
    """
    specs = specs_of(cfg)
    rule = make_optimizer(cfg.optimizer, cfg.train.num_steps, trainable_specs(cfg))
    if cfg.optimizer.clip_norm > 0:
        rule = optax.chain(optax.clip_by_global_norm(cfg.optimizer.clip_norm), rule)

    @functools.cache
    def gradients(of: Config):
        return jax.jit(lambda params, batch: reference_gradients(params, batch, of))

    @jax.jit
    def update(grads, opt_state, params, batch, extra, step):
        trainable, frozen = split(params, specs)
        updates, opt_state = rule.update(grads, opt_state, trainable)
        new = join(optax.apply_updates(trainable, updates), frozen)
        for feature in features_of(cfg):
            new = feature.plain(new, params, batch, cfg)
        new, extra = post_updates.plain(cfg, new, params, extra, step)
        return new, opt_state, extra

    params = start = initial_params(specs, cfg.train.seed)
    loss, grads = first = gradients(with_weights_of(cfg, 0))(params, batches[0])
    opt_state, losses = rule.init(split(params, specs)[0]), []
    initial = functools.partial(initial_params, seed=cfg.train.seed)
    extra = post_updates.plain_state(cfg, trainable_specs(cfg), initial)
    for step, batch in enumerate(batches[:steps]):
        loss, grads = gradients(with_weights_of(cfg, step))(params, batch)
        params, opt_state, extra = update(grads, opt_state, params, batch, extra, step)
        losses.append(float(loss))
    every = every_probe(cfg)
    probes = jax.jit(lambda params: own_probes.plain(params, batches[0], cfg, every))(start)
    return TrainingTrace(
        to_host(start), float(first[0]), to_host(first[1]), losses, to_host(params), to_host(probes)
    )


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

    loss = preference_loss if cfg.dpo else token_loss
    t, m = cfg.train, cfg.model
    of_routers = experts_in(m) and (t.balance_loss or t.router_z_loss)
    has_more = t.z_loss or of_routers or (m.mtp_depth and t.mtp_loss)

    def both(trainable):
        params = join(trainable, frozen)
        if cfg.distill:
            return distillation_losses(params, batch, cfg)
        total = loss(params, batch, cfg)
        return total, loss(params, batch, plain) if has_more else total

    (_, reported), grads = jax.value_and_grad(both, has_aux=True)(trainable)
    return reported, grads


def token_loss(params: Any, batch: Batch, cfg: Config) -> jax.Array:
    """Compute the plain model's loss of tokens."""
    return loss_of_logical(params, batch, cfg, loss_of(cfg))


def mesh_trace(
    cfg: Config,
    mesh: Mesh,
    batches: Sequence[Batch],
    steps: int,
    compiler_options: dict[str, Any] | None = None,
) -> TrainingTrace:
    """Do the same with the train step on a mesh; `cfg` is resolved for the mesh."""
    state = init_state(cfg, mesh)
    init = params = logical(state.params, cfg)
    placed = [shard_batch(batch, cfg, mesh) for batch in batches[: max(steps, 1)]]
    most = max_segments(cfg)

    programs: list[tuple[Any, Any]] = [(make_gradient_step(cfg, mesh, most), state.params)]
    if steps:
        programs.append((make_train_step(cfg, mesh, most), state))
    lowered = [step.lower(first, placed[0]) for step, first in programs]
    compiled = functools.partial(jax.stages.Lowered.compile, compiler_options=compiler_options)
    with ThreadPoolExecutor(2) as pool:  # most of the time, and on one core each
        gradient_step, *train_step = pool.map(compiled, lowered)
    measured, grads = gradient_step(state.params, placed[0])
    losses = []
    for step in train_step:
        for batch in placed:
            state, at_step = step(state, batch)
            losses.append(float(at_step["loss"]))
        params = logical(state.params, cfg)
    probes = {probe.metric: measured[probe.metric] for probe in every_probe(cfg)}
    loss, grads = float(measured["loss"]), logical(grads, cfg)
    return TrainingTrace(init, loss, grads, losses, params, to_host(probes))


def logical(tree: Any, cfg: Config) -> Arrays:
    """Return parameters or gradients of a running state on the host, in the model's layer order."""
    return to_host(to_logical(TrainState(0, tree, ()), cfg).params)


def to_host(tree: Any) -> Arrays:
    """Flatten a tree of arrays to numpy arrays by name."""
    return {name: np.asarray(a) for name, a in flat(tree).items()}
