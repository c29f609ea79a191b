"""The GPT-3 block and its relatives: the plain model's loss and gradients on every mesh."""

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
    ConfigError,
    GatedDeltaNet,
    Layer,
    Mlp,
    replace,
)
from jaxpar.config.validate import check, resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.slow import slow
from tests.tiny import ATTENTION, EXPERTS, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

FEED_FORWARD, ROPE = "model.layers.feed_forward", "model.layers.mixer.rope"

BIASES = {"model.layers.mixer.bias": True, "model.layers.mixer.out_bias": True}
LAYER_NORM = {"model.norm.kind": "layer"}
GPT3 = BIASES | LAYER_NORM | {FEED_FORWARD: Mlp(24, "gelu", bias=True), ROPE: None}
GPT3 |= {"model.max_positions": 32}
#: RMSNorm and a gate, in parallel; the norm's scale is deferred.
PARALLEL_LLAMA = {"model.layers.parallel": "own_norms"}
ONE_NORM = {"model.layers.parallel": "one_norm"}
NEOX = BIASES | LAYER_NORM | PARALLEL_LLAMA
NEOX |= {FEED_FORWARD: Mlp(24, "gelu_exact", bias=True), f"{ROPE}.fraction": 0.5}
GPT_J = NEOX | dict.fromkeys(BIASES, False) | ONE_NORM
RELU_MLP = Mlp(24, "relu_squared")
RELU = {FEED_FORWARD: RELU_MLP}
DELTA_NET = GatedDeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=32)
DELTA = Layer("delta_layers", DELTA_NET, RELU_MLP)
HYBRID = {"model.layers": [DELTA, Layer("layers", ATTENTION, RELU_MLP)] * 2}
OF_RELU = dataclasses.replace(EXPERTS, expert=RELU_MLP)
STAGES = {"model.num_layers": 4, "parallel.layer_loop": "unroll"}

CASES = [
    ("data=2,sequence=2,tensor=2", GPT3 | {"model.tie_embeddings": True}),
    slow("pipeline=2,num_microbatches=2,tensor=2,zero=1", NEOX | STAGES),
    slow("data=2,tensor=2", GPT_J),
    slow("sequence=2,tensor=2,context=ring", NEOX | {"parallel.remat": "full"}),
    slow("sequence=2,context=ulysses", GPT3 | {"data.document_mask": False}),
    slow("data=2,tensor=2,row_groups=2,layer_loop=unroll", GPT3),
    slow("pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1", GPT3 | STAGES),
    slow("data=2", PARALLEL_LLAMA),
    slow("tensor=2", ONE_NORM),
    slow("data=2,expert=2", PARALLEL_LLAMA | LAYER_NORM | {FEED_FORWARD: EXPERTS}),
    slow("data=2,tensor=2", RELU),
    slow("data=2,tensor=2", HYBRID | {"parallel.layer_loop": "unroll"}),
    slow("data=2,num_microbatches=2,zero=2", RELU | {f"{FEED_FORWARD}.activation": "silu"}),
    slow(
        "data=2,tensor=2",
        GPT3 | {"lora.rank": 2, "lora.targets": ("q_proj", "up_proj", "down_proj")},
    ),
    slow("data=2", NEOX | {"parallel.remat": "none", "parallel.layer_loop": "unroll"}),
]


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batch = traces.random_batch(cfg, 0)
    return batch, weights.plain_gradients(cfg, batch)


@pytest.mark.slow  # quicker: convert/test_goldens.py
@pytest.mark.parametrize(("mesh", "values"), CASES)
def test_gradients(mesh, values, devices):
    cfg = replace(TINY, **values)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch, wanted = reference_of(replace(cfg, **{"parallel.row_groups": 1}))
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    zero = distances.zero_gradients(cfg.model)
    assert not distances.compare(found, wanted, TOLERANCE, zero).mismatches()
    if cfg.model.max_positions and not cfg.lora:
        assert np.abs(wanted.gradients["positions"]).max() > 1e-3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({f"{FEED_FORWARD}.activation": "gelu_exact"}, r"'gelu_exact': must be one of silu, gelu"),
        (
            RELU | {f"{FEED_FORWARD}.activation": ClampedSwiglu()},
            r"must be one of silu, gelu, gelu_exact",
        ),
        (
            {FEED_FORWARD: OF_RELU, f"{FEED_FORWARD}.expert.bias": True},
            r"expert\.bias = True: is not supported with .*: they have no biases",
        ),
        (
            {FEED_FORWARD: OF_RELU, "compute.matmul_dtype": "float8"},
            r"matmul_dtype = 'float8': is not supported with .* not rounded",
        ),
        (RELU | {"lora.rank": 2}, r"lora\.targets = .*: must be names from .*up_proj"),
        (LAYER_NORM | {"model.layers.norms": "around"}, r"norms = 'around': must be before with"),
        (LAYER_NORM | {"model.norm.offset": True}, r"offset = True: needs .* rms"),
        (ONE_NORM | {"model.layers.norms": "after"}, r"'one_norm': needs a norm before the branch"),
        (
            PARALLEL_LLAMA | {"parallel.row_groups": 2},
            r"parallel = 'own_norms': is not supported with .*row_groups = 2",
        ),
        (GPT3 | {"data.seq_len": 64}, r"max_positions = 32: must be at least .*seq_len = 64"),
        (
            GPT3 | {"model.max_positions": 33, "parallel.tensor": 2},
            r"max_positions = 33: must be divisible by parallel\.tensor = 2",
        ),
        ({"model.max_positions": -1}, r"max_positions = -1: must not be negative"),
    ],
)
def test_what_cannot_be(values, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(TINY, **values))
