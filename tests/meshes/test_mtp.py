"""Multi-token prediction: the plain model's loss and gradients on every mesh."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.certification.small_config import steady
from jaxpar.config import Config, GatedDeltaNet, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.state import abstract_state
from jaxpar.step.train_step import make_eval_step, make_train_step
from tests import weights
from tests.extend.test_components import (
    ATTENTION,
    HEADS,
    LAYERS,
    Attention,
    DecayedMean,
    Glu,
    Layer,
    config,
)
from tests.meshes.test_experts import compare
from tests.meshes.test_latent_attention import DENSE, EXPERTS, NO_QUERY_LATENT, V3
from tests.slow import slow
from tests.tiny import ATTENTION as TINY_ATTENTION
from tests.tiny import GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(TINY, **{"model.mtp_depth": 1, "train.mtp_loss": 0.3})

TWO = {"model.mtp_depth": 2, "train.z_loss": 1e-2}
DEEPSEEK = DENSE | {"parallel.layer_loop": "unroll", "train.balance_loss": 1e-2}

MORE_LAYERS = LAYERS | {
    "before": [
        Layer("mixes", DecayedMean(num_heads=4), Glu(24)),
        Layer("attends", ATTENTION, None),
    ],
    "capped": [Layer("block", Attention(**HEADS, softcap=5.0, chunk=6), Glu(24), norms="after")]
    * 2,
    "no mixer": [Layer("attends", ATTENTION, None), Layer("feeds", None, Glu(24))],
}
COMPOSED = {
    name: {"model": dataclasses.replace(config(*layers).model, mtp_depth=2)}
    for name, layers in MORE_LAYERS.items()
}

#: The last layer, which modules are like, is not like the first.
DELTA = GatedDeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=32)
ATTENDS = Layer("layers", TINY_ATTENTION, GLU)
HYBRID = {"model.layers": [Layer("delta_layers", DELTA, GLU), ATTENDS]}
NOPE = {
    "model.layers": [ATTENDS, Layer("nope", dataclasses.replace(TINY_ATTENTION, rope=None), GLU)]
}

CASES = [
    ("sequence=2,tensor=2,context=ring", {}),
    slow("data=2,sequence=2,tensor=2,context=ring", TWO),
    slow("pipeline=2,num_microbatches=2,tensor=2,zero=1,layer_loop=unroll", V3),
    slow("data=1", {}),
    slow("data=2,sequence=2,tensor=2", TWO),
    slow("sequence=4,context=ulysses,zero=1", {"data.document_mask": False}),
    slow("data=2,num_microbatches=2,zero=2,layer_loop=unroll", {}),
    slow("data=2,num_microbatches=4,zero=1,tensor=2,layer_loop=unroll", TWO),
    slow("data=2,tensor=2,row_groups=2,layer_loop=unroll", {}),
    slow("pipeline=2,num_microbatches=4,zero=1,schedule=zero_bubble,layer_loop=unroll", TWO),
    slow("pipeline=2,num_microbatches=4,schedule=gpipe,data=2,layer_loop=unroll", {}),
    slow("replica=2,tensor=2", {"model.tie_embeddings": True, "model.logits_softcap": 5.0}),
    slow("data=2,expert=2,tensor=2,layer_loop=unroll", DEEPSEEK | TWO),
    slow("expert=2,sequence=2,zero=1,num_microbatches=2,layer_loop=unroll", DEEPSEEK),
    slow("data=2,zero=2,num_microbatches=2,layer_loop=unroll", DEEPSEEK | NO_QUERY_LATENT),
    slow("data=2,tensor=2", EXPERTS | {"train.router_z_loss": 1e-2}),
    slow("pipeline=2,num_microbatches=2,expert=2,zero=1,layer_loop=unroll", DEEPSEEK | TWO),
    slow("pipeline=2,num_microbatches=2,data=2,sequence=2,layer_loop=unroll", DEEPSEEK),
    slow("pipeline=2,num_microbatches=2,schedule=gpipe", EXPERTS | {"train.router_z_loss": 1e-2}),
    slow("sequence=2,tensor=2", COMPOSED["before"]),
    slow("pipeline=2,num_microbatches=2,tensor=2", COMPOSED["sigmoid"]),
    slow("data=2,tensor=2", COMPOSED["sigmoid"]),
    slow("sequence=2,data=2", COMPOSED["sigmoid"]),
    slow("data=2,num_microbatches=2,zero=1,layer_loop=scan", COMPOSED["mean"]),
    slow("sequence=2,data=2", COMPOSED["windows"]),
    slow("expert=2,sequence=2", COMPOSED["experts"]),
    slow("expert=2,pipeline=2,num_microbatches=2", COMPOSED["experts"]),
    slow("data=2,tensor=2", COMPOSED["products"]),
    slow("sequence=2,tensor=2", COMPOSED["capped"]),
    slow("data=2,tensor=2", COMPOSED["no mixer"]),
    slow("sequence=2,tensor=2,layer_loop=unroll", HYBRID),
    slow("data=2,tensor=2,layer_loop=unroll", NOPE),
]


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batch = traces.random_batch(cfg, 0)
    return batch, weights.plain_gradients(cfg, batch)


@pytest.mark.parametrize(("mesh", "values"), CASES)
def test_gradients(mesh, values, devices):
    cfg = replace(BASE, **values)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch, wanted = reference_of(cfg)
    assert np.abs(wanted.gradients["mtp/w_join"]).max() > 1e-4
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


@pytest.mark.parametrize(
    ("mesh", "values"),
    [
        slow("sequence=2,tensor=2,context=ring,layer_loop=unroll", V3 | EXPERTS),
        slow("data=2,expert=2,layer_loop=unroll", DEEPSEEK | TWO),
        slow("pipeline=2,num_microbatches=2,layer_loop=unroll", TWO),
        slow("pipeline=2,num_microbatches=2,data=2,layer_loop=unroll", DEEPSEEK | TWO),
    ],
)
def test_steps(mesh, values, devices):
    """Weights after some steps, those of the biases of routers too."""
    found = compare(mesh, steady(replace(BASE, **values)), devices, steps=2)
    assert found.update is not None and not found.mismatches()


@pytest.mark.slow
def test_a_step_with_experts_has_the_types_of_its_state(devices):
    """Tracing fails if a gradient or a bias of a module were not reduced over an axis."""
    cfg = resolve(replace(BASE, **DEEPSEEK, **{"parallel.tensor": 2}), 4)
    mesh = make_mesh(cfg.parallel, devices[:4])
    state, batch = abstract_state(cfg), traces.random_batch(cfg, 0)
    after, metrics = jax.eval_shape(make_train_step(cfg, mesh), state, batch)
    assert jax.tree.map(lambda a: a.shape, after) == jax.tree.map(lambda a: a.shape, state)
    assert metrics["mtp_loss"].shape == ()
    held_out = jax.eval_shape(make_eval_step(cfg, mesh), state.params, batch)
    assert [a.shape for a in held_out] == [(), ()]
