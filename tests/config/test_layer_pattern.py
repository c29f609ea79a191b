"""Bad patterns of layers: each is one error that names field, value, rule and fix."""

import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.validate import check
from tests.meshes.test_recurrent_layers import DELTA_NET, KIMI_LINEAR, QWEN3_NEXT

PLAIN = {"model.layer_pattern": ""}
MAMBA = {"model.layer_pattern": "GM*", "model.num_layers": 3}

#: What the Triton kernels compute.
KERNELS = {
    "compute.recurrent_backend": "triton",
    "compute.dtype": "bfloat16",
    "model.recurrent_chunk": 64,
    "model.linear_key_head_dim": 128,
    "model.linear_value_head_dim": 128,
}

#: What layers of Gated DeltaNet alone read, as it is by default.
DEFAULTS = {
    "model.linear_num_key_heads": 4,
    "model.linear_num_value_heads": 8,
    "model.linear_key_head_dim": 32,
    "model.linear_value_head_dim": 32,
    "model.recurrent_chunk": 64,
}
#: The same of the sizes that Kimi Delta Attention reads too.
OF_DELTA = {
    "num_key_heads": 4,
    "num_value_heads": 8,
    "key_head_dim": 32,
    "value_head_dim": 32,
}
REFUSED = {
    "parallel.remat_group": 2,
    "parallel.layers_per_stage": "2",
}

CASES = [
    ({"model.layer_pattern": "GX"}, "pattern = 'GX': must be of the letters"),
    ({"model.layer_pattern": "G"}, r"pattern = 'G': must have a layer with attention.*G\*"),
    ({"model.num_layers": 3}, "num_layers = 3: must be a multiple of 2.*num-layers 4"),
    (PLAIN, "linear_num_key_heads = 2: needs a layer of kind G.*heads 4"),
    (
        {"model.linear_num_value_heads": 3},
        "value_heads = 3: must be a multiple of model.linear_num_key_heads = 2.*heads 4",
    ),
    ({"model.linear_num_key_heads": 0}, "key_heads = 0: must be at least 1"),
    ({"model.conv_kernel_size": 1}, "conv_kernel_size = 1: must be at least 2"),
    ({"model.conv_kernel_size": 40}, "conv_kernel_size = 40: must be at most 33"),
    ({"model.recurrent_chunk": 0}, "recurrent_chunk = 0: must be at least 1"),
    ({"parallel.pipeline": 2}, "pipeline = 2: must divide the 1 repetitions.*pipeline 1"),
    (
        {"parallel.pipeline": 2, "model.num_layers": 4, "parallel.schedule": "zero_bubble"},
        "layer_pattern = 'G\\*': is not supported with parallel.schedule = zero_bubble.*1f1b",
    ),
    *[
        ({path: value}, f"layer_pattern = .*: is not supported with {path} = {value}")
        for path, value in REFUSED.items()
    ],
    ({"model.linear_norm_eps": 0.0}, "norm_eps = 0.0: must be above 0.*eps None"),
    (PLAIN | DEFAULTS | {"model.recurrent_norms": "before"}, "norms = 'before': needs a layer of"),
    (PLAIN | DEFAULTS | {"model.linear_allow_neg_eigval": True}, "eigval = True: needs a layer of"),
    ({"model.mamba_num_groups": 2}, "mamba_num_groups = 2: needs a layer of kind M.*groups 1"),
    (MAMBA | {"model.mamba_num_groups": 3}, "num_heads = 8: must be a multiple of .*= 3.*heads 9"),
    (MAMBA | {"model.mamba_min_step": -1.0}, "mamba_min_step = -1.0: must not be negative"),
    (
        {"model.layer_pattern": "G*-", "model.num_layers": 3, "model.num_experts": 4},
        "num_experts = 4: does not support model.layer_pattern.*dense",
    ),
    (
        {"model.layer_pattern": "G*E", "model.num_layers": 3},
        r"num_experts = 0: must be above 0: .* with experts \(E\).*experts 8.*G\*-",
    ),
    (
        {"model.layer_pattern": "G*E", "model.num_experts": 4, "model.dense_d_ff": 8}
        | {"model.num_layers": 3},
        "dense_d_ff = 8: needs model.dense_layers, which is 0",
    ),
    (
        {"model.layer_pattern": "G*E-", "model.num_experts": 4, "model.dense_d_ff": 9}
        | {"model.num_layers": 4, "parallel.tensor": 2, "model.d_ff": 8},
        "dense_d_ff = 9: must be divisible by parallel.tensor = 2.*dense-d-ff 10",
    ),
    ({"model.layer_pattern": "", "model.rope_fraction": 0.0} | DEFAULTS, "rope_fraction = 0.0"),
    (
        PLAIN | DEFAULTS | {"compute.recurrent_backend": "triton"},
        "needs a layer of kind G or M or K",
    ),
    (
        KERNELS | {"model.layer_pattern": "K*", "model.linear_num_value_heads": 2},
        "backend = 'triton': .* there is no kernel for decays of each channel.*backend auto",
    ),
    (
        {"model.layer_pattern": "K*"},
        r"value_heads = 4: must be model.linear_num_key_heads = 2: .*\(K\).*value-heads 2",
    ),
    (
        {"model.layer_pattern": "k*", "model.linear_num_value_heads": 2},
        r"num_experts = 0: must be above 0: layers of kind k .*experts 8.*pattern 'K\*'",
    ),
    (
        {"model.layer_pattern": "k*E-", "model.num_experts": 4, "model.num_layers": 4}
        | {"model.linear_num_value_heads": 2},
        "pattern = 'k.*': has layers of kind k, which have no feed-forward beside - or E",
    ),
    (
        KERNELS | {"compute.dtype": "float32"},
        "backend = 'triton': .* need bfloat16.*dtype bfloat16",
    ),
    (KERNELS | {"model.recurrent_chunk": 48}, "chunk = 48: must be 32 or 64 for .*chunk 64"),
    (KERNELS | {"model.linear_key_head_dim": 96}, "key_head_dim = 96: must be 64 or 128.*dim 128"),
    (
        KERNELS | {"model.linear_value_head_dim": 96},
        "value_head_dim = 96: must be a multiple of 64.*dim 128",
    ),
    (
        KERNELS | MAMBA | {"model.mamba_state_size": 16, "model.mamba_head_dim": 64},
        "state_size = 16: must be 64 or 128",
    ),
    (
        {"lora.rank": 5, "lora.targets": "q_proj,in_proj"},
        "rank = 5: must be at most 4, the smaller dimension of in_proj",
    ),
    ({"model.shared_expert_gate": True}, "shared_expert_gate = True: needs experts"),
]


@pytest.mark.parametrize(("fields", "message"), CASES)
def test_one_error_with_a_fix(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(DELTA_NET, **fields))


def test_kernels_by_name():
    check(replace(DELTA_NET, **KERNELS))


def test_heads_are_split_over_tensor():
    with pytest.raises(ConfigError, match=r"linear_num_key_heads = 2: must be divisible by .*tens"):
        check(replace(DELTA_NET, **{"parallel.tensor": 4, "model.num_kv_heads": 4}))


def test_the_matrices_after_latents_are_split():
    said = r"linear_value_head_dim = 8: must be divisible by .*data = 16.*after latents"
    wide = {"model.d_model": 32, "train.global_batch_size": 16, "model.kv_lora_rank": 16}
    with pytest.raises(ConfigError, match=said):
        check(replace(KIMI_LINEAR, **wide, **{"parallel.data": 16}))


def test_attention_on_latents_may_have_no_positions_beside_a_recurrence():
    check(KIMI_LINEAR)
    alone = {"model.layer_pattern": "", "model.num_layers": 2, "model.dense_d_ff": None}
    alone |= {f"model.linear_{name}": value for name, value in OF_DELTA.items()}
    with pytest.raises(ConfigError, match=r"rope_fraction = 0\.0: "):
        check(replace(KIMI_LINEAR, **alone, **{"model.recurrent_chunk": 64}))


def test_a_gate_needs_shared_experts():
    with pytest.raises(
        ConfigError, match=r"shared_expert_gate = True: needs model\.num_shared_exp"
    ):
        check(replace(QWEN3_NEXT, **{"model.num_shared_experts": 0}))
