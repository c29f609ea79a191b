"""A user's loss, probes and post-update on meshes, compared with the plain model."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import Loss, Probe, load_config
from jaxpar.certification import traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.certification.small_config import steady
from jaxpar.config import Config, ConfigError, Glu, Layer, replace
from jaxpar.config.metrics import metric_of
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import specs_of
from jaxpar.objectives.objective import objective_of
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.features import declare_own_metrics, own_probes
from jaxpar.step.state import init_state, to_logical
from jaxpar.step.train_step import (
    LAYERS,
    make_eval_step,
    make_gradient_step,
    make_train_step,
)
from tests.slow import slow_but
from tests.tiny import ATTENTION, TINY
from tests.tiny import EXPERTS as ROUTED

pytestmark = pytest.mark.usefixtures("quick_compile")


class Smoothed(Loss):
    """Everything that a loss may use: weights of tokens, all scores, metrics."""

    smoothing: float = 0.1

    def __call__(self, scores, batch):
        lse = scores.logsumexp()
        nll, rest = lse - scores.label(), lse - scores.mean()
        values = (1 - self.smoothing) * nll + self.smoothing * rest - 0.01 * scores.entropy()
        return values, 1.0 + batch.positions % 3

    def metrics(self, values, batch):
        return {"early_loss": (values, batch.positions < 5)}


class Selected(Loss):
    """Weights that depend on the scores: some of it has a gradient, some has none."""

    stopped: bool = False

    def __call__(self, scores, batch):
        nll = scores.logsumexp() - scores.label()
        weights = (nll > 3.5) + jax.lax.stop_gradient(scores.entropy())
        return nll, weights if self.stopped else weights + jnp.exp(-nll)

    def metrics(self, values, batch):
        return {"early_loss": (values, batch.positions < 5)}


class OfSources(Loss):
    """Weights by source, and the loss of each source."""

    weights: tuple[float, ...] = (1.0, 3.0)
    reads = ("source",)

    def __call__(self, scores, batch):
        return scores.logsumexp() - scores.label(), jnp.asarray(self.weights)[batch.source]

    def metrics(self, values, batch):
        return {f"loss_{i}": (values, batch.source == i) for i in range(len(self.weights))}


class Largest(Probe):
    reduce = "max"

    def __call__(self, x):
        return jnp.max(jnp.abs(x), axis=-1)


def rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1))


def unchanged(scores: jax.Array) -> jax.Array:
    return scores


def likeliest(probabilities: jax.Array) -> jax.Array:
    return jnp.max(probabilities, axis=-1)


def mean_of_cubes(x: jax.Array) -> jax.Array:
    return jnp.mean(x.astype(jnp.float32) ** 3, axis=-1)  # a norm makes squares trivial


PROBES = (
    Probe(name="stream", reduce="mean", value=rms),
    Largest(name="largest_stream"),
    Probe(name="into_mixer", point="mixer_input", reduce="sum", value=rms),
    Probe(name="from_mixer", point="mixer_output", reduce="mean", value=rms),
    Largest(name="into_feed_forward", point="feed_forward_input"),
    Probe(name="from_feed_forward", point="feed_forward_output", reduce="mean", value=rms),
    Probe(name="score", point="scores", reduce="max", value=unchanged),
    Probe(name="into_head", point="head", reduce="mean", value=mean_of_cubes),
    Largest(name="largest_into_head", point="head"),
)

BASE = replace(
    TINY,
    **{
        "model.num_layers": 3,
        "train.loss": Smoothed(),
        "train.probes": PROBES,
        "train.post_updates": load_config("extending").train.post_updates,
        "optimizer.ema.decay": 0.9,
    },
)
ROUTERS = Probe(name="router", point="router", reduce="mean", value=likeliest)
EXPERTS = replace(
    BASE,
    **{
        "model.layers.feed_forward": ROUTED,
        "model.layers.feed_forward.expert": Glu(12),
        "train.probes": (*PROBES, ROUTERS),
        "train.loss": OfSources(),
        "train.balance_loss": 0.1,
    },
)
DENSE = Layer("dense_layers", ATTENTION, Glu(12))
DENSE_FIRST = replace(EXPERTS, **{"model.layers": [DENSE, *EXPERTS.model.layers[1:]]})
FOUR_LAYERS = replace(BASE, **{"model.num_layers": 4})

MESHES = [
    ("pipeline=2,data=2,tensor=2,virtual_stages=2,num_microbatches=2", FOUR_LAYERS),
    ("data=2,tensor=2", BASE),
    ("pipeline=2,tensor=2,num_microbatches=2", BASE),
    ("sequence=2,data=2", BASE),
    ("data=2,zero=1,num_microbatches=2,layer_loop=scan", BASE),
    ("tensor=2,row_groups=2,layer_loop=unroll", BASE),
    ("expert=2,data=2", EXPERTS),
    ("expert=2,pipeline=2", EXPERTS),
    ("data=2,sequence=2", EXPERTS),
    ("pipeline=2,layer_loop=unroll", DENSE_FIRST),
    ("data=2,tensor=2", replace(BASE, **{"model.mtp_depth": 1})),
    ("data=2,tensor=2", replace(BASE, **{"model.layers.parallel": "own_norms"})),
]


def on_mesh(item: str, cfg: Config) -> tuple[Config, Any]:
    parallel = parse_meshes([item], cfg.parallel)[item]
    n = math.prod(axis_sizes(parallel))
    cfg = resolve(replace(cfg, parallel=parallel), n)
    return cfg, make_mesh(cfg.parallel, jax.devices()[:n])


@functools.cache
def plain(cfg: Config) -> tuple[Any, ...]:
    """Trace of two steps, probes of the first, state of the post-update after them."""
    batch = traces.random_batch(cfg)
    trace = traces.reference_trace(cfg, [batch, batch], 2)
    params = traces.initial_params(specs_of(cfg), cfg.train.seed)
    measured = jax.jit(lambda p: own_probes.plain(p, batch, cfg, own_probes.probes_of(cfg)))(params)
    return trace, jax.device_get(measured)


@pytest.mark.parametrize(("item", "cfg"), slow_but(MESHES[1:2], MESHES))
def test_own_code_on_a_mesh_agrees_with_the_plain_model(item, cfg):
    wanted, measured = plain(cfg)
    here, mesh = on_mesh(item, cfg)
    batch = traces.shard_batch(traces.random_batch(cfg), here, mesh)
    step = make_train_step(here, mesh)
    state = init_state(here, mesh)
    state, first = step(state, batch)
    for name, value in measured.items():
        np.testing.assert_allclose(first[name], value, rtol=2e-5, err_msg=name)
    losses = [float(first["loss"])]
    state, second = step(state, batch)
    losses.append(float(second["loss"]))
    np.testing.assert_allclose(losses, wanted.losses, rtol=1e-5)
    now = to_logical(state, here)
    for name, value in flat(jax.device_get(now.params)).items():
        np.testing.assert_allclose(value, wanted.params[name], atol=2e-5, err_msg=name)
    rows = np.linalg.norm(np.asarray(now.params["layers"]["w_down"]), axis=-1)
    np.testing.assert_allclose(rows, 1.0, atol=1e-6)
    kept = np.asarray(now.extra["unit_rows"]["layers"]["norm"])
    assert kept.shape == rows.shape and np.all(kept != 1)


def weighted(cfg: Config, loss: Loss) -> Config:
    own: dict[str, Any] = {"train.probes": (), "train.post_updates": (), "optimizer.ema": None}
    return replace(cfg, **own, **{"train.loss": loss})


@functools.cache
def plain_gradients(cfg: Config) -> tuple[float, dict[str, Any]]:
    batch = traces.random_batch(cfg)
    params = traces.initial_params(specs_of(cfg), cfg.train.seed)
    found = jax.jit(lambda p: traces.reference_gradients(p, batch, cfg))(params)
    return float(found[0]), traces.to_host(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("item", "cfg"),
    [(item, weighted(cfg, Selected())) for item, cfg in MESHES]
    + [("pipeline=2,data=2,num_microbatches=2", weighted(BASE, Selected(stopped=True)))],
)
def test_weights_that_depend_on_the_scores_have_exact_gradients(item, cfg):
    loss, wanted = plain_gradients(cfg)
    here, mesh = on_mesh(item, cfg)
    batch = traces.shard_batch(traces.random_batch(cfg), here, mesh)
    params = init_state(here, mesh).params
    metrics, grads = make_gradient_step(here, mesh)(params, batch)
    found = traces.logical(grads, here)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    for name, value in wanted.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[name], value, atol=2e-5 * scale, err_msg=name)
    total, count = make_eval_step(here, mesh)(params, batch)
    evaluated = objective_of(here).report(total / count)
    for name in ("loss", "early_loss"):
        assert float(evaluated[name]) == pytest.approx(float(metrics[name]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("item", ["replica=2,data=2", "replica=2,tensor=2,num_microbatches=2"])
@pytest.mark.parametrize("loss", [OfSources(), Selected()])
def test_replicas_of_diloco_train_on_means_of_their_own(item, loss):
    """A step of each, with its own source. Metrics are of the global batch."""
    cfg = steady(replace(weighted(BASE, loss), **{"train.probes": PROBES}))
    rows = cfg.train.global_batch_size // 2
    batch = traces.random_batch(cfg)
    replicas = np.repeat(np.arange(2, dtype=np.int32), rows)
    if loss.reads:
        batch.extra["source"][:] = replicas[:, None]
    params = traces.initial_params(specs_of(cfg), cfg.train.seed)
    whole = own_probes.plain(params, batch, cfg, PROBES)
    halves = [jax.tree.map(lambda a, r=r: a[replicas == r], batch) for r in range(2)]
    steps = [traces.reference_trace(cfg, [half], 1) for half in halves]
    tokens = [np.sum(half.labels >= 0) for half in halves]

    diloco = {"diloco.every": 4, "parallel.replica": 2}
    here, mesh = on_mesh(item, replace(cfg, **diloco))
    placed = traces.shard_batch(batch, here, mesh)
    state, metrics = make_train_step(here, mesh)(init_state(here, mesh), placed)
    wanted = np.average([step.loss for step in steps], weights=tokens)
    assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)
    for name, value in whole.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)
    if loss.reads:
        found = [float(metrics[f"loss_{r}"]) for r in range(2)]
        np.testing.assert_allclose(found, [step.loss for step in steps], rtol=1e-5)
    for name, both in flat(jax.device_get(state.extra["diloco"]["weights"])).items():
        for value, step in zip(both, steps, strict=True):
            np.testing.assert_allclose(value, step.params[name], atol=2e-5, err_msg=name)


def test_metrics_of_a_loss_and_of_probes_are_described(monkeypatch):
    monkeypatch.setattr("jaxpar.config.metrics.MORE", {})
    declare_own_metrics(BASE)
    loss, stream = metric_of("early_loss"), metric_of("stream")
    assert loss.group == "training" and "Smoothed" in loss.meaning
    assert (
        stream.group == "layers" and stream.meaning == "mean over tokens at residual, of each layer"
    )


class Overwriting(Smoothed):
    def metrics(self, values, batch):
        return {"grad_norm": (values, batch.positions)}


def test_a_metric_of_a_loss_has_a_name_of_its_own():
    with pytest.raises(ConfigError, match=r"Overwriting.metrics = 'grad_norm': .* another's"):
        objective_of(replace(BASE, **{"train.loss": Overwriting()}))


@pytest.mark.slow
def test_steps_between_records_of_layers_are_the_same_without_them():
    cfg = replace(BASE, **{"metrics.layers_every": 10})
    here, mesh = on_mesh("data=2", cfg)
    batch = traces.shard_batch(traces.random_batch(cfg), here, mesh)
    _, without = make_train_step(here, mesh)(init_state(here, mesh), batch)
    _, there = make_train_step(here, mesh, requested=(LAYERS,))(init_state(here, mesh), batch)
    assert there.keys() - without.keys() == {probe.metric for probe in PROBES}
    assert float(without["loss"]) == pytest.approx(float(there["loss"]), rel=1e-6)


@pytest.mark.slow
def test_the_moving_average_is_that_of_the_weights_after_a_post_update():
    cfg = replace(BASE, **{"train.probes": (), "optimizer.ema.decay": 0.5})
    here, mesh = on_mesh("data=2", cfg)
    state = init_state(here, mesh)
    first = np.asarray(state.params["layers"]["w_down"])
    batch = traces.shard_batch(traces.random_batch(cfg), here, mesh)
    state, _ = make_train_step(here, mesh)(state, batch)
    now, mean = (np.asarray(t["layers"]["w_down"]) for t in (state.params, state.extra["ema"]))
    share = (mean - first) / (now - first)
    assert share.min() > 0 and share.max() - share.min() < 1e-3
