"""Does a mesh compute what the plain model computes? The pieces of `verify.py` and of the tests.

A `Trace` is what a few training steps did: initial weights, first gradients, the loss of each step
and the final weights, all as logical arrays on the host. `reference_trace` makes one with
`model/reference.py` and optax on a single device, `mesh_trace` with the train step on a mesh, and
the functions at the end measure how far two traces lie apart. Batches are random packed documents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxpar.axes import BATCH_SPEC
from jaxpar.batch import IGNORED, Batch
from jaxpar.config import Config, ParallelConfig, replace
from jaxpar.model import reference
from jaxpar.model.transformer import param_specs, trained_specs
from jaxpar.optimizer import make_optimizer
from jaxpar.parallel.context import token_order
from jaxpar.params import count, flat, init_options, initialize, join, split
from jaxpar.state import TrainState, init_state, to_logical
from jaxpar.step import make_gradient_step, make_train_step

type Arrays = dict[str, np.ndarray]

#: Compiler options for simulated devices, where LLVM's optimisations take most of the time.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

#: Documents that start in a window, and the share of labels dropped, in a random batch.
DOCUMENTS, DROPPED = 4, 0.05


def random_batch(cfg: Config, index: int = 0) -> Batch:
    """Random tokens in packed documents of random length, on the host, in the text's own order.

    A function of (train.seed, index). Labels that another document or nothing follows, and a few
    more, are IGNORED. Without `data.document_mask` a window is one document.
    """
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
    return Batch(
        tokens=text[:, :T],
        labels=np.where(dropped, np.int32(IGNORED), text[:, 1:]),
        segment_ids=np.cumsum(starts[:, :T], axis=1, dtype=np.int32),
        positions=(place - first).astype(np.int32),
    )


def place_batch(batch: Batch, cfg: Config, mesh: Mesh) -> Batch:
    """A host batch on the mesh, its tokens in the order that the loader gives them."""
    order = token_order(cfg.parallel, cfg.data.seq_len)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    put = lambda a: jax.device_put(a if order is None else a[:, order], sharding)  # noqa: E731
    return jax.tree.map(put, batch)


# ---------------------------------------------------------------------------------- traces


@dataclass(frozen=True)
class Trace:
    """What a run of a few steps did, by parameter name where there are arrays."""

    init: Arrays
    loss: float
    """Of the first batch, beside its gradients."""
    gradients: Arrays
    losses: list[float]
    """Of each training step."""
    params: Arrays
    """After the last step."""


def reference_trace(cfg: Config, batches: Sequence[Batch], steps: int) -> Trace:
    """The plain model, `jax.grad` and optax on one device, one batch per step.

    Args:     batches: at least one; the first gives the gradients. steps: how many to train on.
    """
    specs = param_specs(cfg.model, cfg.lora)
    rule = make_optimizer(cfg.optimizer, cfg.train.num_steps, trained_specs(cfg))
    if cfg.optimizer.clip_norm > 0:
        rule = optax.chain(optax.clip_by_global_norm(cfg.optimizer.clip_norm), rule)
    gradients = jax.jit(lambda params, batch: reference_gradients(params, batch, cfg))

    @jax.jit
    def update(grads, opt_state, params):
        moved, still = split(params, specs)
        updates, opt_state = rule.update(grads, opt_state, moved)
        return join(optax.apply_updates(moved, updates), still), opt_state

    make = lambda seed: initialize(specs, seed)  # noqa: E731
    options = init_options(jax.default_backend())
    params = start = jax.jit(make, compiler_options=dict(options))(cfg.train.seed)
    loss, grads = first = gradients(params, batches[0])
    opt_state, losses = rule.init(split(params, specs)[0]), []
    for batch in batches[:steps]:
        loss, grads = gradients(params, batch)
        params, opt_state = update(grads, opt_state, params)
        losses.append(float(loss))
    return Trace(to_host(start), float(first[0]), to_host(first[1]), losses, to_host(params))


def reference_gradients(params: Any, batch: Batch, cfg: Config) -> tuple[jax.Array, Any]:
    """The plain model's reported loss (without z-loss), and its gradients (with it), of the
    parameters that are trained."""
    plain = replace(cfg, **{"train.z_loss": 0.0})
    moved, still = split(params, param_specs(cfg.model, cfg.lora))

    def both(moved):
        params = join(moved, still)
        return reference.loss(params, batch, cfg), reference.loss(params, batch, plain)

    (_, reported), grads = jax.value_and_grad(both, has_aux=True)(moved)
    return reported, grads


def mesh_trace(
    cfg: Config,
    mesh: Mesh,
    batches: Sequence[Batch],
    steps: int,
    compiler_options: dict[str, Any] | None = None,
) -> Trace:
    """The same of the train step on a mesh; `cfg` is resolved for it."""
    state = init_state(cfg, mesh)
    init = params = logical(state.params, cfg)
    placed = [place_batch(batch, cfg, mesh) for batch in batches[: max(steps, 1)]]

    def compiled(step, *args):
        return step.lower(*args).compile(compiler_options=compiler_options)

    gradient_step = compiled(make_gradient_step(cfg, mesh), state.params, placed[0])
    measured, grads = gradient_step(state.params, placed[0])
    losses = []
    if steps:
        step = compiled(make_train_step(cfg, mesh), state, placed[0])
        for batch in placed:
            state, at_step = step(state, batch)
            losses.append(float(at_step.loss))
        params = logical(state.params, cfg)
    return Trace(init, float(measured.loss), logical(grads, cfg), losses, params)


def logical(tree: Any, cfg: Config) -> Arrays:
    """Parameters or gradients of a running state, on the host, in the model's order of layers."""
    return to_host(to_logical(TrainState(0, tree, ()), cfg).params)


def to_host(tree: Any) -> Arrays:
    """A tree of arrays as numpy arrays by name."""
    return {name: np.asarray(a) for name, a in flat(tree).items()}


# ------------------------------------------------------------------------------- distances


def differing(found: Arrays, wanted: Arrays) -> list[str]:
    """Names of the arrays that are not the same, bit for bit."""
    assert found.keys() == wanted.keys(), set(found) ^ set(wanted)
    return [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]


def gradient_errors(found: Arrays, wanted: Arrays) -> dict[str, float]:
    """Of each array: largest absolute error, relative to its largest absolute value."""
    assert found.keys() == wanted.keys(), set(found) ^ set(wanted)
    return {n: _ratio(np.abs(found[n] - w).max(), np.abs(w).max()) for n, w in wanted.items()}


def update_errors(found: Arrays, wanted: Arrays, start: Arrays) -> dict[str, float]:
    """Of each array after some steps: mean error, relative to the mean change since `start`.

    Means, not maxima: Adam moves an element by about lr * g / |g|, so one whose gradient g is no
    larger than the rounding of gradients goes either way, by a whole lr, on any mesh. Such elements
    are few, and `update_tolerance` says how much they can add to the mean; `steady` stops them.
    """
    assert found.keys() == wanted.keys(), set(found) ^ set(wanted)
    mean = lambda a, b: np.abs(a.astype(np.float64) - b).mean()  # noqa: E731
    return {n: _ratio(mean(found[n], w), mean(w, start[n])) for n, w in wanted.items()}


def loss_error(found: Trace, wanted: Trace) -> float:
    """Largest relative error of any of the losses."""
    pairs = zip([found.loss, *found.losses], [wanted.loss, *wanted.losses], strict=True)
    return max(_ratio(abs(a - b), abs(b)) for a, b in pairs)


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """The largest error and its name."""
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def _ratio(error: float, size: float) -> float:
    """error / size; infinite where that is no number, so that it exceeds any tolerance."""
    if error == 0:
        return 0.0
    ratio = float(error) / float(size) if size > 0 else np.inf
    return ratio if np.isfinite(ratio) else np.inf


@dataclass(frozen=True)
class Comparison:
    """How far a trace lies from the reference's."""

    tolerance: float
    differing: list[str]
    """Initial parameters that are not the same, bit for bit."""
    loss: float
    """Largest relative error of any loss."""
    gradient: tuple[float, str]
    """Worst of `gradient_errors`, and the parameter."""
    update: tuple[float, str] | None
    """Worst of `update_errors`; None without steps."""

    def mismatches(self) -> list[str]:
        """What lies further apart than the tolerance allows, in words."""
        t, found = self.tolerance, []
        if self.differing:
            found.append(f"initial weights of {', '.join(self.differing)} have other bits")
        if self.loss > t:
            found.append(f"loss off by {self.loss:.1e}, allowed {t:.1e}")
        if self.gradient[0] > t:
            error, name = self.gradient
            found.append(f"gradient of {name} off by {error:.1e}, allowed {t:.1e}")
        if self.update and self.update[0] > update_tolerance(t):
            error, name = self.update
            allowed = f"allowed {update_tolerance(t):.1e}"
            found.append(f"{name} after the steps off by {error:.1e}, {allowed}")
        return found


def update_tolerance(tolerance: float) -> float:
    """Bound on `update_errors`, given one on gradients; `verify.py` derives it."""
    return tolerance * (1 + math.log(1 / tolerance))


def compare(found: Trace, wanted: Trace, tolerance: float) -> Comparison:
    """A mesh's trace against the reference's."""
    after = update_errors(found.params, wanted.params, wanted.init) if found.losses else None
    return Comparison(
        tolerance=tolerance,
        differing=differing(found.init, wanted.init),
        loss=loss_error(found, wanted),
        gradient=worst(gradient_errors(found.gradients, wanted.gradients)),
        update=worst(after) if after else None,
    )


# -------------------------------------------------------------------------- small configs


def float32(cfg: Config) -> Config:
    """The config in float32, which only the reference attention computes everywhere."""
    return replace(
        cfg,
        **{
            "model.dtype": "float32",
            "model.matmul_dtype": "compute",
            "model.float8_scaling": "tensor",
            "model.attention_backend": "reference",
            "parallel.grad_reduce": "float32",
            "parallel.gather_dtype": "compute",
            "optimizer.first_moment_dtype": "float32",
            "optimizer.second_moment_dtype": "float32",
        },
    )


#: The eps of `steady`, in root mean squares of all gradients when their norm is 1.
STEADY_EPS = 0.02


def steady(cfg: Config) -> Config:
    """The config with an Adam whose update is no less continuous than the model: a larger eps.

    With one below the rounding error of gradients, an element whose gradient is nothing else moves
    by up to a whole learning rate either way; and since the loss is not linear, all gradients of
    the next step are off by what that adds to them: a hundred times what rounding did.
    """
    eps = STEADY_EPS / math.sqrt(count(trained_specs(cfg)))
    return replace(cfg, **{"optimizer.eps": max(cfg.optimizer.eps, eps)})


#: The least window of a shrunk model. In one of 1, queries have no gradient but rounding.
LEAST_WINDOW = 4


def shrink(cfg: Config, meshes: Sequence[ParallelConfig]) -> Config:
    """A small model of the same kind, in sizes that all the meshes divide.

    Kept are all flags, the ratios of query to KV heads, of widths, and of window and RoPE scaling
    to the sequence, and the variance of what a matrix puts out. The learning rate starts at its
    peak, so that a few steps move the weights.
    """
    every = lambda ways: math.lcm(*map(ways, meshes))  # noqa: E731
    up = lambda size, of: max(-(-round(size) // of), 1) * of  # noqa: E731
    m, groups = cfg.model, cfg.model.num_heads // cfg.model.num_kv_heads
    head_ways = every(lambda p: p.tensor * (p.sequence if p.context == "ulysses" else 1))
    kv_heads = up(2, math.lcm(every(lambda p: p.tensor), head_ways // math.gcd(head_ways, groups)))
    heads, head_dim = kv_heads * groups, 8
    width = heads * head_dim * m.d_model / (m.num_heads * m.head_dim)
    d_model = up(width, every(lambda p: p.data * p.expert * p.sequence))
    seq_len = up(32, every(lambda p: p.sequence * p.tensor * 2))
    shorter = seq_len / cfg.data.seq_len
    stages = every(lambda p: p.pipeline * p.virtual_stages)
    d_ff = up(d_model * m.d_ff / m.d_model, every(lambda p: p.tensor))
    rows = lambda p: p.replica * p.data * p.expert * p.num_microbatches * p.row_groups  # noqa: E731
    values = {
        "model.num_layers": up(2, stages * max(m.global_every, 1)),
        "model.d_model": d_model,
        "model.num_heads": heads,
        "model.num_kv_heads": kv_heads,
        "model.head_dim": head_dim,
        "model.d_ff": d_ff,
        "model.vocab_size": up(128, every(lambda p: p.tensor * p.pipeline)),
        "model.init_std": m.init_std * math.sqrt(m.d_model / d_model),
        "data.seq_len": seq_len,
        "train.global_batch_size": up(8, every(rows)),
        "optimizer.warmup_steps": 0,
    }
    if cfg.lora.rank:
        rank = min(cfg.lora.rank, head_dim, d_model, d_ff)
        values |= {"lora.rank": rank, "lora.alpha": cfg.lora.alpha * rank / cfg.lora.rank}
    if m.num_experts:
        values["model.num_experts"] = min(m.num_experts, 8)
        values["model.experts_per_token"] = min(m.experts_per_token, 4)
    if m.sliding_window is not None:
        least = min(m.sliding_window, LEAST_WINDOW)
        values["model.sliding_window"] = max(round(m.sliding_window * shorter), least)
    if m.query_scale_dim is not None:
        values["model.query_scale_dim"] = up(m.query_scale_dim * head_dim / m.head_dim, 1)
    if m.rope_scaling is not None:
        original = up(m.rope_scaling.original_max_position * shorter, 1)
        values["model.rope_scaling.original_max_position"] = original
    return replace(cfg, **values)
