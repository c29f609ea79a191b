"""Preferences: the plain model's loss and gradients of pairs, and its scores, on every mesh."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.certification.small_config import steady
from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import param_specs
from jaxpar.model.plain import decoder
from jaxpar.parallel.context import order_of
from jaxpar.sharding.batch import IGNORED
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.forward import make_score_step
from jaxpar.step.train_step import make_eval_step
from tests import weights
from tests.meshes.test_experts import compare
from tests.slow import slow
from tests.tiny import EXPERTS, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(TINY, **{"dpo.beta": 0.3, "dpo.label_smoothing": 0.1})

OF_EXPERTS = {"model.layers.feed_forward": EXPERTS, "train.balance_loss": 1e-2}
SOFTCAP = {"model.logits_softcap": 5.0, "model.tie_embeddings": True}
LORA = {"lora.rank": 2}

CASES = [
    ("sequence=2,tensor=2,context=ring", SOFTCAP),
    slow("pipeline=2,num_microbatches=2,data=2,sequence=2,layer_loop=unroll", {}),
    slow("data=1", SOFTCAP),
    slow("sequence=4,context=ulysses,zero=1", {"dpo.label_smoothing": 0.0}),
    slow("data=2,num_microbatches=2,zero=2,layer_loop=unroll,loss_chunks=3", {}),
    slow("replica=2,data=2,tensor=2,loss_chunks=5", SOFTCAP),
    slow("pipeline=2,num_microbatches=4,zero=1,schedule=zero_bubble,layer_loop=unroll", {}),
    slow("pipeline=2,num_microbatches=2,schedule=gpipe,tensor=2", SOFTCAP),
    slow("pipeline=2,num_microbatches=2,virtual_stages=1,tensor=2,sequence=2", LORA),
    slow("data=2,tensor=2,layer_loop=unroll,row_groups=2", LORA),
    slow("expert=2,sequence=2,num_microbatches=2,layer_loop=unroll", OF_EXPERTS),
]


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batch = traces.random_batch(cfg, 0)
    return batch, weights.plain_gradients(cfg, batch)


def on_mesh(mesh: str, values: dict, devices):
    cfg = replace(BASE, **values)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    return cfg, resolve(replace(cfg, parallel=parallel), n), make_mesh(parallel, devices[:n])


@pytest.mark.parametrize(("mesh", "values"), CASES)
def test_gradients(mesh, values, devices):
    cfg, there, devices_of = on_mesh(mesh, values, devices)
    batch, wanted = reference_of(cfg)
    found = weights.first_gradients(there, devices_of, batch)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


@pytest.mark.parametrize(
    ("mesh", "values"),
    [
        slow("sequence=2,tensor=2,context=ring", {}),
        slow("pipeline=2,num_microbatches=2,data=2,layer_loop=unroll", LORA),
    ],
)
def test_steps(mesh, values, devices):
    found = compare(mesh, steady(replace(BASE, **values)), devices, steps=2)
    assert found.update is not None and not found.mismatches()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "values"),
    [
        ("sequence=2,tensor=2,context=ring", SOFTCAP),
        ("pipeline=2,num_microbatches=2,data=2,sequence=2,layer_loop=unroll", {}),
        ("data=2,num_microbatches=2,zero=2,layer_loop=unroll,loss_chunks=3", SOFTCAP),
    ],
)
def test_scores_and_held_out_loss(mesh, values, devices):
    """The program of the reference, and the evaluation, which has its loss."""
    cfg, there, devices_of = on_mesh(mesh, values, devices)
    batch, wanted = reference_of(cfg)
    params = weights.init_params(param_specs(cfg.model), there, devices_of)
    placed, most = traces.shard_batch(batch, there, devices_of), traces.max_segments(cfg)
    found = np.asarray(make_score_step(there, devices_of, most)(params, placed))
    order = order_of(there)
    found = found if order is None else found[:, np.argsort(order)]
    plain = weights.values_of(tuple(flat(param_specs(cfg.model)).items()), cfg.train.seed)
    of = plain, batch.tokens, batch.positions, batch.segment_ids
    scores = jax.nn.log_softmax(jax.jit(lambda *a: decoder.logits_of(*a, cfg.model))(*of))
    at = jnp.take_along_axis(scores, jnp.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    expected = np.where(batch.labels == IGNORED, 0, at)
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()
    totals, pairs = make_eval_step(there, devices_of, most)(params, placed)
    assert pairs == np.sum((batch.positions == 0) & (batch.segment_ids % 2 == 1))
    assert totals[0] / pairs == pytest.approx(wanted.loss, rel=TOLERANCE)
