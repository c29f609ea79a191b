"""Attention sinks: the plain model's loss and gradients on every mesh, those of the sinks too."""

import dataclasses
import functools
import math

import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import (
    ClampedSwiglu,
    Config,
    Experts,
    Glu,
    Layer,
    RopeScaling,
    Router,
    replace,
)
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.slow import slow
from tests.tiny import ATTENTION, GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(TINY, **{"model.layers.mixer.sinks": True})

#: gpt-oss's layers: every second one has a window.
SINKS = dataclasses.replace(ATTENTION, sinks=True)
WINDOWS = {
    "model.layers": [
        Layer("local_layers", dataclasses.replace(SINKS, window=5), GLU),
        Layer("layers", SINKS, GLU),
    ]
    * 2,
    "parallel.layer_loop": "unroll",
}
GPT_OSS = WINDOWS | {
    "model.*.feed_forward": Experts(
        expert=Glu(24, ClampedSwiglu(limit=1.0), bias=True),
        num_experts=4,
        experts_per_token=2,
        router=Router(linear_bias=True),
    ),
    "model.*.mixer.bias": True,
    "model.*.mixer.out_bias": True,
    "model.*.mixer.rope.scaling": RopeScaling(
        kind="yarn", original_max_position=16, truncate=False
    ),
    "train.balance_loss": 1e-2,
}
CASES = [
    ("data=2,sequence=2,tensor=2,context=ring", {}),
    slow("sequence=2,tensor=2,context=ulysses,zero=1", {"model.layers.mixer.num_kv_heads": 4}),
    slow("data=2,sequence=2,tensor=2", {}),
    slow("sequence=4,context=ulysses", {"parallel.remat": "none"}),
    slow("sequence=4,context=ring", {"parallel.remat": "attn_out", "data.document_mask": False}),
    slow("pipeline=2,num_microbatches=2,tensor=2,zero=1", WINDOWS),
    slow("pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1", WINDOWS),
    slow("data=2,tensor=2,row_groups=2,layer_loop=unroll", {"parallel.remat": "full"}),
    slow("data=2,num_microbatches=2,zero=2", WINDOWS),
    slow("data=2,expert=2,tensor=2", GPT_OSS),
    slow("expert=2,sequence=2,context=ring", GPT_OSS),
    slow("pipeline=2,num_microbatches=2,expert=2,zero=1", GPT_OSS),
    slow("data=2,zero=3", WINDOWS | {"parallel.grad_reduce": "float32"}),
]


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batch = traces.random_batch(cfg, 0)
    return batch, weights.plain_gradients(cfg, batch)


@pytest.mark.slow  # quicker: kernels/test_sinks.py
@pytest.mark.parametrize(("mesh", "values"), CASES)
def test_gradients(mesh, values, devices):
    cfg = replace(BASE, **values)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch, wanted = reference_of(replace(cfg, **{"parallel.row_groups": 1}))
    largest = {name: np.abs(g).max() for name, g in wanted.gradients.items()}
    for name in {layer.name for layer in cfg.model.layers}:
        assert largest[f"{name}/sinks"] > 1e-3 * max(largest.values())
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()
