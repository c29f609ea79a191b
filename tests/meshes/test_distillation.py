"""Distillation: the plain loss and gradients on every mesh, and the teacher's likeliest tokens."""

import functools
import math

import jax
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.certification.small_config import steady
from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.features.distillation import IDS, SCORES
from jaxpar.features.distillation.loss import likeliest
from jaxpar.model.parameters import param_specs
from jaxpar.model.plain import decoder
from jaxpar.parallel.context import order_of
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.forward import make_token_step
from jaxpar.step.train_step import make_gradient_step
from tests import weights
from tests.meshes.test_experts import compare
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(TINY, **{"distill.teacher": "runs/teacher", "distill.top_k": 5})

HOT = {"distill.temperature": 2.0, "distill.weight": 0.9, "model.logits_softcap": 5.0}
WHOLE = {"distill.top_k": 48, "distill.weight": 1.0, "model.tie_embeddings": True}
OF_FOUR_HEADS = {"distill.top_k": 20, "model.layers.mixer.num_kv_heads": 4}

CASES = [
    ("sequence=2,tensor=2,loss_chunks=3", HOT),
    slow("pipeline=2,num_microbatches=2,sequence=2,tensor=2,loss_chunks=3,layer_loop=unroll", HOT),
    slow("data=1", {}),
    slow("data=1", WHOLE),
    slow("data=2,tensor=2,loss_chunks=5", WHOLE),
    slow(
        "sequence=2,tensor=4,context=ring",
        OF_FOUR_HEADS,
    ),
    slow("data=2,num_microbatches=2,zero=2,layer_loop=unroll", HOT),
    slow("pipeline=2,num_microbatches=4,zero=1,schedule=zero_bubble,layer_loop=unroll", {}),
    slow("replica=2,data=2,num_microbatches=2,zero=1,layer_loop=unroll", {"lora.rank": 2}),
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


@pytest.mark.slow
def test_the_loss_is_least_where_student_and_teacher_agree():
    """With some tokens only: the gradient is 0 at the teacher's own logits, the divergence too."""
    cfg = replace(BASE, **{"distill.weight": 1.0, "distill.temperature": 1.5})
    params = weights.values_of(tuple(flat(param_specs(cfg.model)).items()), 3)
    batch = traces.random_batch(cfg, 0)
    of = params, batch.tokens, batch.positions, batch.segment_ids
    logits = np.asarray(decoder.logits_of(*of, cfg.model)) / 1.5
    scores = np.asarray(jax.nn.log_softmax(logits))
    ids = np.argsort(-scores, axis=-1)[..., :5].astype(np.int32)
    own = {IDS: ids, SCORES: np.take_along_axis(scores, ids, axis=-1)}
    one = resolve(replace(cfg, **{"parallel.data": 1}), 1)
    mesh = make_mesh(one.parallel, jax.devices()[:1])
    taught = traces.shard_batch(batch.replace(extra=own), one, mesh)
    measured, grads = make_gradient_step(one, mesh)(jax.device_put(params), taught)
    assert abs(measured["distill_loss"]) < 1e-6 and measured["loss"] > 1
    assert max(np.abs(g).max() for g in jax.tree.leaves(grads)) < 1e-6


@pytest.mark.parametrize(
    ("mesh", "values"), [slow("sequence=2,tensor=2,context=ring", HOT), slow("data=4", WHOLE)]
)
def test_steps(mesh, values, devices):
    found = compare(mesh, steady(replace(BASE, **values)), devices, steps=2)
    assert found.update is not None and not found.mismatches()


@pytest.mark.parametrize(
    ("mesh", "k"),
    [
        ("sequence=2,tensor=2,loss_chunks=3", 30),
        slow("pipeline=2,num_microbatches=2,sequence=2,tensor=2,layer_loop=unroll", 20),
        slow("data=2,tensor=2", 48),
        slow("data=2,num_microbatches=2,zero=2,layer_loop=unroll", 1),
    ],
)
def test_the_likeliest_tokens(mesh, k, devices):
    """With 2 or 4 shards of a vocabulary of 48, 30 or 20 are more than a shard has."""
    cfg, there, devices_of = on_mesh(mesh, {}, devices)
    batch = traces.random_batch(replace(cfg, **{"distill.teacher": ""}), 0)
    params = weights.init_params(param_specs(cfg.model), there, devices_of)
    placed = traces.shard_batch(batch, there, devices_of)
    head = lambda top, x, mb: likeliest(top, x, there, k, 2.0)  # noqa: E731
    found = make_token_step(there, devices_of, head)(params, placed)
    order = order_of(there)
    ids, scores = (np.asarray(a if order is None else a[:, np.argsort(order)]) for a in found)
    plain = weights.values_of(tuple(flat(param_specs(cfg.model)).items()), cfg.train.seed)
    of = plain, batch.tokens, batch.positions, batch.segment_ids
    logits = jax.jit(lambda *a: decoder.logits_of(*a, cfg.model))(*of) / 2.0
    expected = np.asarray(jax.nn.log_softmax(logits))
    assert np.abs(np.take_along_axis(expected, ids, axis=-1) - scores).max() < 1e-5
    best = -np.sort(-expected, axis=-1)[..., :k]
    assert np.abs(scores - best).max() < 1e-5 and ids.shape[-1] == k
