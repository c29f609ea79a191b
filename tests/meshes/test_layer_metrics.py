"""Metrics of layers on meshes, compared with the plain model."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.components.experts import experts_in
from jaxpar.config import Config, Glu, Layer, replace
from jaxpar.model.parameters import specs_of
from jaxpar.model.plain import decoder
from jaxpar.step.features import layer_metrics, own_probes
from jaxpar.step.features.layer_metrics import LayerMetrics
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_train_step
from tests.meshes.test_global_layers import GEMMA4
from tests.meshes.test_own_code import on_mesh
from tests.slow import slow
from tests.tiny import ATTENTION, TINY
from tests.tiny import EXPERTS as ROUTED

pytestmark = pytest.mark.usefixtures("quick_compile")

BASE = replace(TINY, **{"model.num_layers": 3, "metrics.layers": "all"})
FEED_FORWARD = "model.layers.feed_forward"
OF_EXPERTS = {FEED_FORWARD: ROUTED, f"{FEED_FORWARD}.expert": Glu(12), "train.balance_loss": 0.1}
EXPERTS = replace(BASE, **OF_EXPERTS)
DENSE = Layer("dense_layers", ATTENTION, Glu(12))
DENSE_FIRST = replace(EXPERTS, **{"model.layers": [DENSE, *EXPERTS.model.layers[1:]]})
FOUR_LAYERS = replace(BASE, **{"model.num_layers": 4})
KINDS = replace(GEMMA4, **{"model.num_layers": 4, "metrics.layers": "all"})

MESHES = [
    slow("pipeline=2,data=2,tensor=2,virtual_stages=2,num_microbatches=2", FOUR_LAYERS),
    slow("expert=2,data=2", replace(EXPERTS, **{"model.num_layers": 2})),
    ("data=2,tensor=2", BASE),
    slow("expert=2,pipeline=2", EXPERTS),
    slow("pipeline=2,tensor=2,num_microbatches=2", BASE),  # stages of two layers and of one
    slow("sequence=2,data=2", BASE),
    slow("data=2,zero=1,num_microbatches=2,layer_loop=scan", BASE),
    slow("tensor=2,row_groups=2,layer_loop=unroll", BASE),
    slow("expert=2,data=2", EXPERTS),
    slow("data=2,sequence=2", EXPERTS),
    slow("pipeline=2,layer_loop=unroll", DENSE_FIRST),
    slow("data=2,tensor=2,layer_loop=unroll", DENSE_FIRST),
    slow("data=2,tensor=2", replace(BASE, **{"model.mtp_depth": 1})),
    slow("data=2,tensor=2", KINDS),
    slow("pipeline=2,num_microbatches=2", KINDS),
]


def of_layers(tree: dict[str, np.ndarray], cfg: Config) -> np.ndarray:
    """Sums of squares of each layer's logical arrays."""
    names = np.array([layer.name for layer in cfg.model.layers])
    total = np.zeros(len(names))
    for name, array in tree.items():
        if (stack := name.partition("/")[0]) in names:
            squares = np.square(array.astype(np.float64)).reshape(len(array), -1).sum(axis=1)
            total[names == stack] += squares
    return total


@functools.cache
def plain(cfg: Config) -> dict[str, Any]:
    """The metrics of the first step."""
    batch = traces.random_batch(cfg)
    trace = traces.reference_trace(cfg, [batch], 1)
    params = traces.initial_params(specs_of(cfg), cfg.train.seed)
    probes = layer_metrics.every_probe(cfg)
    found = jax.jit(lambda p: own_probes.plain(p, batch, cfg, probes))(params)
    for name, value in found.items():
        np.testing.assert_allclose(value, trace.probes[name], rtol=1e-6)
    old = {name: trace.init[name] for name in trace.gradients}
    change = {name: trace.params[name] - a for name, a in old.items()}
    found["layer_grad_norm"] = np.sqrt(of_layers(trace.gradients, cfg))
    found["layer_update"] = np.sqrt(of_layers(change, cfg) / of_layers(old, cfg))
    if experts_in(cfg.model):
        rows = np.asarray(decoder.loads(params, batch, cfg))
        fullest = np.full(len(cfg.model.layers), np.nan)
        fullest[-len(rows) :] = rows.max(axis=1) / rows.mean(axis=1)
        found["layer_fullest_expert"] = fullest
    return jax.device_get(found)


@pytest.mark.parametrize(("item", "cfg"), MESHES)
def test_metrics_of_layers_agree_with_the_plain_model(item, cfg):
    here, mesh = on_mesh(item, cfg)
    batch = traces.shard_batch(traces.random_batch(cfg), here, mesh)
    _, found = make_train_step(here, mesh)(init_state(here, mesh), batch)
    wanted = plain(cfg)
    assert {name for name in found if name in LayerMetrics.metrics} == wanted.keys()
    for name, value in wanted.items():
        assert value.shape == (len(cfg.model.layers),)
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
