"""Master weights in host memory: the same losses, gradients and updates, on every mesh."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.config import ConfigError, Router, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import init_state, state_shardings
from jaxpar.step.train_step import make_eval_step, make_gradient_step, make_train_step
from tests.tiny import EXPERTS, TINY

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

MOMENTS = {"optimizer.offload": True}
MASTERS = MOMENTS | {"optimizer.offload_masters": True}
BASE = replace(TINY, **{"compute.dtype": "bfloat16", "model.layers.mixer.bias": True})
STAGES = {
    "parallel.pipeline": 2,
    "parallel.num_microbatches": 2,
    "parallel.zero": 1,
    "model.num_layers": 4,
}
MESHES = {
    "one device": {},
    "sharded": {"parallel.data": 2, "parallel.tensor": 2},
    "ZeRO-1, unrolled": {
        "parallel.data": 2,
        "parallel.zero": 1,
        "parallel.layer_loop": "unroll",
        "model.tie_embeddings": True,
    },
    "ZeRO-2": {"parallel.data": 2, "parallel.zero": 2},
    "virtual stages": {**STAGES, "parallel.virtual_stages": 2},
    "unequal stages": {**STAGES, "parallel.layers_per_stage": (3, 1)},
    "experts": {
        "parallel.expert": 2,
        "model.layers.feed_forward": EXPERTS,
        "model.layers.feed_forward.router": Router(score="sigmoid", balancing_bias=True),
    },
}


def ready(devices, **fields):
    """A resolved config and its mesh."""
    cfg = replace(BASE, **fields)
    p = cfg.parallel
    n = p.pipeline * max(p.data, 1) * p.tensor * p.expert
    cfg = resolve(cfg, n)
    return cfg, make_mesh(cfg.parallel, devices[:n])


def kinds_of(tree):
    """The kinds of memory of a tree's arrays."""
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["sharded", *(name for name in MESHES if name != "sharded")])
def test_losses_and_updates_are_those_of_masters_on_the_device(devices, mesh):
    """The first loss and norm bit for bit; updates but for the order of sums in a loop: an ulp."""
    found, wanted = [], []
    for fields, seen in ((MASTERS, found), (MOMENTS, wanted)):
        cfg, on = ready(devices, **fields, **MESHES[mesh])
        state, step = init_state(cfg, on), make_train_step(cfg, on)
        weights = [jax.device_get(traces.logical(state.params, cfg))]
        for i in range(2):
            batch = traces.shard_batch(traces.random_batch(cfg, i), cfg, on)
            state, metrics = step(state, batch)
            seen.append(jax.device_get((metrics["loss"], metrics["grad_norm"])))
        assert jax.tree.map(lambda a: a.sharding, state) == state_shardings(cfg, on)
        seen.append([*weights, jax.device_get(traces.logical(state.params, cfg))])
    assert found[0] == wanted[0]
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4)
    start, end = wanted[2]
    chex.assert_trees_all_equal(found[2][0], start)
    assert distances.worst(distances.update_errors(found[2][1], end, start))[0] < 1e-4


@pytest.mark.slow
def test_gradients_and_evaluations_are_the_same_bits(devices):
    found, wanted = [], []
    for fields, seen in ((MASTERS, found), (MOMENTS, wanted)):
        cfg, on = ready(devices, **fields, **MESHES["sharded"])
        state = init_state(cfg, on)
        batch = traces.shard_batch(traces.random_batch(cfg), cfg, on)
        seen.append(jax.device_get(make_gradient_step(cfg, on)(state.params, batch)))
        seen.append(jax.device_get(make_eval_step(cfg, on)(state.params, batch)))
    chex.assert_trees_all_equal(found, wanted)


def test_masters_and_moments_lie_in_host_memory(devices):
    cfg, mesh = ready(devices, **MASTERS, **MESHES["experts"])
    state = init_state(cfg, mesh)
    assert {a.dtype for a in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    layers = dict(state.params["layers"])
    assert kinds_of(layers.pop("router_bias")) == {"device"}  # is not trained
    rest = {name: a for name, a in state.params.items() if name != "layers"}
    assert kinds_of((layers, rest)) == {"pinned_host"}
    assert kinds_of(state.opt_state[0].mu) == {"pinned_host"}


@pytest.mark.slow
def test_a_step_that_is_skipped_keeps_every_bit(devices):
    cfg, mesh = ready(devices, **MASTERS)
    state = init_state(cfg, mesh)
    gain = state.params["final_norm"]
    nan = jax.device_put(np.full(gain.shape, np.nan, np.float32), gain.sharding)
    state = dataclasses.replace(state, params=state.params | {"final_norm": nan})
    before = jax.device_get((state.params, state.opt_state))
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    after, metrics = make_train_step(cfg, mesh)(state, batch)
    assert int(metrics["skipped"]) == 1
    chex.assert_trees_all_equal(jax.device_get((after.params, after.opt_state)), before)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            {"optimizer.offload": False},
            r"masters.*must be in host memory.*--optimizer.offload True",
        ),
        ({"optimizer.ema.decay": 0.9}, r"masters = True: the weights to average are in host"),
        ({"optimizer.qk_clip": 50.0}, r"masters = True: the weights to rescale are in host"),
        ({"lora.rank": 4}, r"masters = True: frozen weights have no.*--lora None"),
    ],
)
def test_what_masters_in_host_memory_are_not_combined_with(fields, rule):
    with pytest.raises(ConfigError, match=f"optimizer.offload_{rule}"):
        resolve(replace(BASE, **(MASTERS | fields)), 1)
