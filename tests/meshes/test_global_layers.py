"""Global layers with heads of their own: the plain model's loss and gradients on every mesh."""

import functools

import pytest

from jaxpar.config import RopeScaling, replace
from tests.meshes import float8_traces
from tests.meshes.test_families import compare
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

#: Two layers, with a window and global, as in Gemma 4.
GEMMA4 = replace(
    TINY,
    **{
        "model.layer_pattern": "*A",
        "model.head_dim": 4,
        "model.global_head_dim": 16,
        "model.global_num_kv_heads": 2,
        "model.global_keys_as_values": True,
        "model.rope_scaling": RopeScaling(kind="proportional", factor=1.0, turning=0.5),
        "model.local_rope_theta": 100.0,
        "model.local_rope_scaling": False,
        "model.sliding_window": 5,
        "model.qk_norm": True,
        "model.value_norm": True,
        "model.post_norms": True,
        "model.layer_scale": True,
        "model.attention_multiplier": 0.1,
    },
)
DEEPER = {"model.num_layers": 4}
#: Both kinds with projections of values, and as many heads of them.
ALIKE = {"model.global_keys_as_values": False, "model.global_num_kv_heads": None}

CASES = [
    ("data=2,tensor=2,layer_loop=scan", {}),
    slow("data=2,zero=2,layer_loop=unroll", ALIKE),
    slow("sequence=2,tensor=2,context=ring", {}),
    slow("sequence=2,tensor=2,context=ulysses,layer_loop=unroll", {}),
    slow("data=2,tensor=2,row_groups=2,layer_loop=unroll", ALIKE),
    slow("pipeline=2,num_microbatches=2,tensor=2,layer_loop=scan", DEEPER),
    slow("pipeline=2,num_microbatches=4,data=2,zero=2,layer_loop=unroll", DEEPER | ALIKE),
    slow("data=2,remat=full,layer_loop=unroll", {"model.norm_offset": True} | DEEPER),
    slow("expert=2,tensor=2", {"model.num_experts": 4, "train.balance_loss": 1e-2}),
    slow("data=2,tensor=2", {"lora.rank": 2, "lora.targets": "q_proj,k_proj,v_proj,down_proj"}),
    # A number of each layer, and norms of values, where all layers are alike.
    slow(
        "pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll",
        {
            "model.layer_pattern": "",
            "model.global_head_dim": None,
            "model.global_num_kv_heads": None,
            "model.global_keys_as_values": False,
            "model.local_rope_theta": None,
            "model.local_rope_scaling": True,
        }
        | DEEPER,
    ),
]


@pytest.mark.parametrize(("mesh", "fields"), CASES)
def test_gradients(mesh, fields, devices):
    compare(replace(GEMMA4, **fields), mesh, devices)


#: In the sizes that float8 needs.
FLOAT8 = {
    "model__layer_pattern": "*A",
    "model__global_head_dim": 16,
    "model__global_num_kv_heads": 2,
    "model__global_keys_as_values": True,
    "model__sliding_window": 9,
    "model__qk_norm": True,
    "model__value_norm": True,
    "model__post_norms": True,
    "model__layer_scale": True,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["tensor=2", "data=2,layer_loop=unroll", "data=2,gather_dtype=float8"]
)
def test_float8_gradients_are_those_of_one_device(mesh, devices):
    gradients = functools.partial(float8_traces.first_gradients, devices=devices, **FLOAT8)
    one, found = gradients("data=1"), gradients(mesh)
    errors = float8_traces.relative_errors(found.gradients, one.gradients)
    assert max(errors.values()) < float8_traces.ACROSS_MESHES
