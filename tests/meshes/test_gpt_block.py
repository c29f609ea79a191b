"""The GPT-3 block and its relatives: the plain model's loss and gradients on every mesh."""

import functools
import math

import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.validate import check, resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.verification import distances, traces
from jaxpar.verification.meshes import parse_meshes
from tests import weights
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BIASES = dict.fromkeys(["model.qkv_bias", "model.out_bias", "model.mlp_bias"], True)
GPT3 = BIASES | {
    "model.norm": "layer",
    "model.mlp_gate": False,
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.max_positions": 32,
}
NEOX = BIASES | {
    "model.norm": "layer",
    "model.mlp_gate": False,
    "model.activation": "gelu_exact",
    "model.parallel_block": True,
    "model.rope_fraction": 0.5,
}
GPT_J = NEOX | {"model.shared_norm": True, "model.qkv_bias": False, "model.out_bias": False}
#: RMSNorm and a gate, in parallel; the norm's scale is deferred.
PARALLEL_LLAMA = {"model.parallel_block": True}
RELU = {"model.mlp_gate": False, "model.activation": "relu_squared"}
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
    slow("tensor=2", PARALLEL_LLAMA | {"model.shared_norm": True}),
    slow("data=2,expert=2", PARALLEL_LLAMA | {"model.num_experts": 4, "model.norm": "layer"}),
    slow("data=2,tensor=2", RELU),
    slow("data=2,tensor=2", RELU | STAGES | {"model.layer_pattern": "G*"}),
    slow("data=2,num_microbatches=2,zero=2", RELU | {"model.activation": "silu"}),
    slow("data=2,tensor=2", GPT3 | {"lora.rank": 2, "lora.targets": "q_proj,up_proj,down_proj"}),
    slow("data=2", NEOX | {"parallel.remat": "none", "parallel.layer_loop": "unroll"}),
]


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batch = traces.random_batch(cfg, 0)
    return batch, weights.plain_gradients(cfg, batch)


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
    if cfg.model.positions == "learned" and not cfg.lora.rank:
        assert np.abs(wanted.gradients["positions"]).max() > 1e-3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.activation": "gelu_exact"}, r"'gelu_exact': must be one of silu, gelu, clamped"),
        (RELU | {"model.activation": "clamped_swiglu"}, r"must be one of silu, gelu, gelu_exact"),
        (
            RELU | {"model.num_experts": 4, "model.expert_bias": True},
            r"expert_bias = True: is not supported with .*: they have no biases",
        ),
        (
            RELU | {"model.num_experts": 4, "compute.matmul_dtype": "float8"},
            r"matmul_dtype = 'float8': is not supported with .* not rounded",
        ),
        (RELU | {"lora.rank": 2}, r"lora\.targets = .*: must be names from .*up_proj"),
        ({"model.norm": "layer", "model.post_norms": True}, r"post_norms = True: needs .*norm rms"),
        ({"model.norm": "layer", "model.norm_offset": True}, r"norm_offset = True: needs .* rms"),
        ({"model.shared_norm": True}, r"shared_norm = True: needs model\.parallel_block"),
        (
            {
                "model.shared_norm": True,
                "model.parallel_block": True,
                "model.pre_norms": False,
                "model.post_norms": True,
            },
            r"shared_norm = True: needs model\.pre_norms",
        ),
        (
            PARALLEL_LLAMA | {"parallel.row_groups": 2},
            r"parallel_block = True: is not supported with .*row_groups = 2",
        ),
        ({"model.max_positions": 32}, r"max_positions = 32: needs model\.positions learned"),
        ({"model.positions": "learned"}, r"max_positions = 0: must be at least data\.seq_len = 32"),
        (GPT3 | {"data.seq_len": 64}, r"max_positions = 32: must be at least .*seq_len = 64"),
        (GPT3 | STAGES | {"model.nope_every": 2}, r"nope_every = 2: needs model\.positions rope"),
        (GPT3 | {"model.rope_fraction": 0.5}, r"rope_fraction = 0\.5: needs model\.positions rope"),
        (
            GPT3 | {"model.max_positions": 33, "parallel.tensor": 2},
            r"max_positions = 33: must be divisible by parallel\.tensor = 2",
        ),
        (
            {"model.norm": "layer", "model.layer_pattern": "G*"},
            r"norm = 'layer': is not supported with model\.layer_pattern = G",
        ),
        ({"model.max_positions": -1}, r"max_positions = -1: must not be negative"),
    ],
)
def test_what_cannot_be(values, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(TINY, **values))
