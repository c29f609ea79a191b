"""Layers of several kinds, some of them recurrent: the plain model's loss and gradients on every
mesh. Documents begin anywhere, and chunks divide neither them nor the sequence."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxpar.config import (
    Config,
    Experts,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    Mamba2,
    Mlp,
    QkNorm,
    Rope,
    Router,
    replace,
)
from tests.meshes.test_expert_metrics import measured, rows_of_plain_model
from tests.meshes.test_experts import compare
from tests.slow import slow_but
from tests.tiny import ATTENTION, EXPERTS, GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

#: The norm after a recurrence divides by the length of what it returned, often near 0 in so small a
#: model: with an eps of 1e-5, two orders of the same sums differ by 1.6e-5 on one device.
EPS = 1e-2


def composed(*layers: Layer, **more: Any) -> Config:
    unrolled = {"model.norm.eps": EPS, "parallel.layer_loop": "unroll"}
    return replace(TINY, **{"model.layers": layers} | unrolled | more)


#: One period of two kinds, with more value heads than key heads.
DELTA = GatedDeltaNet(
    num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=6, chunk=5, norm_eps=EPS
)
DELTA_NET = composed(Layer("delta_layers", DELTA, GLU), Layer("layers", ATTENTION, GLU))

#: What else Qwen3-Next has.
SHARED = dataclasses.replace(EXPERTS, num_shared_experts=1)
QWEN3_NEXT = replace(
    DELTA_NET,
    **{
        "model.layers.mixer": dataclasses.replace(
            ATTENTION, gate=True, qk_norm=QkNorm(), rope=Rope(fraction=0.5)
        ),
        "model.*.feed_forward": dataclasses.replace(SHARED, shared_expert_gate=True),
        "model.norm.offset": True,
    },
)

#: Layers of one branch, as in Nemotron-H, without positions in attention.
MAMBA = Layer(
    "mamba_layers",
    Mamba2(
        num_heads=4, head_dim=6, state_size=4, num_groups=2, min_step=0.02, chunk=5, norm_eps=EPS
    ),
    None,
)
SQUARED = Mlp(24, "relu_squared")
MLP = Layer("mlp_layers", None, SQUARED)
ATTENDS = Layer("layers", dataclasses.replace(ATTENTION, rope=None), None)
NEMOTRON_H = composed(MAMBA, MLP, ATTENDS, MLP)

#: Norms of inputs in recurrent layers, and of outputs in the others; rates of up to 2.
REVERSING = dataclasses.replace(DELTA, allow_neg_eigval=True, norm_eps=3e-2)
NORMED = dataclasses.replace(ATTENDS.mixer, num_kv_heads=4, qk_norm=QkNorm(over="all"))
OLMO_HYBRID = composed(
    *[Layer("delta_layers", REVERSING, GLU)] * 2, Layer("layers", NORMED, GLU, norms="after")
)

#: Kimi Delta Attention, whose first layer is dense, and latent attention without positions.
KDA = KimiDeltaAttention(num_heads=4, key_head_dim=4, value_head_dim=8, chunk=5, norm_eps=EPS)
LATENT = LatentAttention(
    num_heads=4,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=6,
    kv_lora_rank=8,
    rope=None,
)
BY_SIGMOID = Router(score="sigmoid", balancing_bias=True, scale=2.5)
ROUTED = dataclasses.replace(SHARED, router=BY_SIGMOID)
KIMI_LINEAR = composed(
    Layer("kda_dense_layers", KDA, GLU),
    Layer("kda_layers", KDA, ROUTED),
    Layer("layers", LATENT, ROUTED),
)

#: The same with experts of two matrices, and in one layer a dense feed-forward.
MOE = Layer(
    "moe_layers",
    None,
    Experts(
        expert=SQUARED,
        num_experts=4,
        experts_per_token=2,
        router=dataclasses.replace(BY_SIGMOID, groups=2),
        num_shared_experts=2,
    ),
)
NEMOTRON_3 = composed(MAMBA, MOE, ATTENDS, MOE, MLP, **{"train.balance_loss": 1e-2})

#: Four layers, for stages and for groups of layers.
DEEPER = replace(DELTA_NET, **{"model.num_layers": 4})

MESHES = """
data=2,tensor=2
sequence=2,tensor=2
data=1
sequence=4
sequence=2,context=ulysses
sequence=2,context=ring
data=2,zero=2,num_microbatches=2
data=2,zero=1,num_microbatches=2
replica=2,sequence=2,remat=full
data=2,tensor=2,row_groups=2
tensor=2,remat=dots
data=2,layer_loop=scan
data=2,zero=2,num_microbatches=2,layer_loop=scan
sequence=2,tensor=2,layer_loop=scan
""".split()


@pytest.mark.parametrize("mesh", slow_but(["sequence=2,tensor=2"], MESHES))
def test_delta_net(mesh, devices):
    assert not compare(mesh, DELTA_NET, devices).mismatches()


DEEPER_MESHES = """
pipeline=2,num_microbatches=2,zero=1
pipeline=2,sequence=2,num_microbatches=2
pipeline=2,tensor=2,num_microbatches=2,zero=1,layer_loop=scan
data=2,layer_loop=scan
data=2,tensor=2
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", DEEPER_MESHES)
def test_stages(mesh, devices):
    assert not compare(mesh, DEEPER, devices).mismatches()


QWEN3_NEXT_MESHES = """
data=2,sequence=2,tensor=2
data=2,tensor=2
expert=2,sequence=2
sequence=2,tensor=2
expert=2,tensor=2,layer_loop=scan
""".split()


@pytest.mark.slow  # quicker: test_delta_net has its recurrence
@pytest.mark.parametrize("mesh", QWEN3_NEXT_MESHES)
def test_qwen3_next(mesh, devices):
    assert not compare(mesh, QWEN3_NEXT, devices).mismatches()


@pytest.mark.slow
def test_rows_of_experts_are_in_the_models_order_of_layers():
    """Whether layers are unrolled, or scanned as places of a period."""
    cfg = replace(QWEN3_NEXT, **{"model.num_layers": 4})
    rows = [
        measured(f"data=2,layer_loop={loop}", cfg)["expert_rows"] for loop in ("unroll", "scan")
    ]
    assert rows[0].shape[0] == 4
    for found in rows:
        np.testing.assert_array_equal(found, rows_of_plain_model(cfg))


NEMOTRON_H_MESHES = """
sequence=2,tensor=2
data=2,tensor=2
sequence=4
data=2,zero=2,num_microbatches=2
data=2,tensor=2,row_groups=2
tensor=2,remat=dots
data=2,layer_loop=scan
""".split()


@pytest.mark.slow  # quicker: model/test_recurrent.py
@pytest.mark.parametrize("mesh", NEMOTRON_H_MESHES)
def test_nemotron_h(mesh, devices):
    assert not compare(mesh, NEMOTRON_H, devices).mismatches()


NEMOTRON_3_MESHES = """
expert=2,sequence=2,tensor=2
expert=2,tensor=2
data=2,tensor=2
expert=2,sequence=2
expert=2,tensor=2,expert_tensor=1
sequence=2,tensor=2
expert=4,expert_dispatch=rows
data=2,zero=2,num_microbatches=2
data=2,zero=1,num_microbatches=2
expert=2,tensor=2,row_groups=2
tensor=2,remat=dots
expert=2,data=2,layer_loop=scan
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", NEMOTRON_3_MESHES)
def test_nemotron_3(mesh, devices):
    assert not compare(mesh, NEMOTRON_3, devices).mismatches()


@pytest.mark.slow
def test_stages_with_experts(devices):
    deeper = replace(NEMOTRON_3, **{"model.num_layers": 10})
    mesh = "pipeline=2,num_microbatches=2,expert=2,zero=1"
    assert not compare(mesh, deeper, devices).mismatches()


KIMI_LINEAR_MESHES = """
sequence=2,tensor=2
tensor=2,zero=1,num_microbatches=2
tensor=2,zero=1,row_groups=2
expert=2,tensor=2
data=2,tensor=2
expert=2,sequence=2
sequence=4
data=2,zero=2,num_microbatches=2
data=2,zero=1,num_microbatches=2
expert=2,tensor=2,row_groups=2
tensor=2,remat=dots
tensor=2,remat=attn_out
expert=2,data=2,layer_loop=scan
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", KIMI_LINEAR_MESHES)
def test_kimi_linear(mesh, devices):
    assert not compare(mesh, KIMI_LINEAR, devices).mismatches()


OLMO_HYBRID_MESHES = """
sequence=2,tensor=2
data=2,tensor=2
sequence=4
data=2,zero=2,num_microbatches=2
data=2,tensor=2,row_groups=2
tensor=2,remat=dots
data=2,layer_loop=scan
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", OLMO_HYBRID_MESHES)
def test_olmo_hybrid(mesh, devices):
    assert not compare(mesh, OLMO_HYBRID, devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "mesh"),
    [
        (NEMOTRON_3, "expert=2,tensor=2"),
        (
            replace(QWEN3_NEXT, **{"model.*.feed_forward.router.balancing_bias": True}),
            "data=2,layer_loop=scan",
        ),
    ],
    ids=["nemotron_3", "two_stacks"],
)
def test_steps_that_balance_by_a_bias(cfg, mesh, devices):
    """The load of each layer goes to the bias in its own stack."""
    found = compare(mesh, replace(cfg, **{"train.router_bias_rate": 0.01}), devices, 5)
    assert found.update is not None and not found.mismatches()


@pytest.mark.slow
def test_steps(devices):
    found = compare("data=2,tensor=2", DELTA_NET, devices, 5)
    assert found.update is not None and not found.mismatches()
