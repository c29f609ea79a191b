"""Bad settings of recurrent layers: each is one error that names field, value, rule and fix."""

import dataclasses

import pytest

from jaxpar.config import (
    ConfigError,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    Mamba2,
    replace,
)
from jaxpar.config.validate import check
from tests.tiny import ATTENTION, GLU, TINY

NET = GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=6)
PERIOD = [Layer("delta_layers", NET, GLU), Layer("layers", ATTENTION, GLU)]
DELTA_NET = replace(TINY, **{"model.layers": PERIOD, "parallel.layer_loop": "unroll"})

#: The beginning of fields of the recurrence.
D = "model.delta_layers.mixer"


def only(mixer):
    """Layers with another recurrence alone, of the name."""
    return {"model.layers": [Layer("delta_layers", mixer, GLU), PERIOD[1]]}


MAMBA = only(Mamba2(num_heads=8, head_dim=4, state_size=4))
KDA = KimiDeltaAttention(num_heads=2, key_head_dim=4, value_head_dim=8)

#: What the Triton kernels compute.
TRITON = {"compute.recurrent_backend": "triton", "compute.dtype": "bfloat16"}
KERNELS = TRITON | {f"{D}.key_head_dim": 128, f"{D}.value_head_dim": 128}
STAGES = {"parallel.pipeline": 2, "parallel.num_microbatches": 3, "model.num_layers": 4}

CASES = [
    ({"model.num_layers": 3}, "num_layers = 3: must be a multiple of 2, .*layers 2, or .*layers 4"),
    (
        {f"{D}.num_value_heads": 3},
        "num_value_heads = 3: must be divisible by num_key_heads = 2.*heads 4",
    ),
    ({f"{D}.num_key_heads": 0}, "key_heads = 0: must be at least 1"),
    ({f"{D}.conv_kernel_size": 1}, "conv_kernel_size = 1: must be at least 2"),
    ({f"{D}.conv_kernel_size": 40}, "conv_kernel_size = 40: must be at most 33"),
    ({f"{D}.chunk": 0}, "chunk = 0: must be at least 1"),
    ({f"{D}.norm_eps": 0.0}, "norm_eps = 0.0: must be above 0.*eps 1e-05"),
    (
        {"parallel.pipeline": 2},
        "num_layers = 2: must be at least 3: 2 layers for each of 2 stages .* repeat after 2",
    ),
    (
        STAGES | {"parallel.layers_per_stage": (1, 3)},
        "stage = '1,3': must be multiples of 2 except the last, .* repeat after 2.*stage 2,2",
    ),
    (
        STAGES | {"parallel.schedule": "zero_bubble", "parallel.zero": 1},
        "mixer = 'GatedDeltaNet': is not supported with parallel.schedule = zero_bubble.*1f1b",
    ),
    (
        {"parallel.remat_group": 2, "parallel.layer_loop": "scan"},
        "layers = .*: is not supported with parallel.remat_group = 2: a scan's step",
    ),
    (MAMBA | {f"{D}.num_groups": 3}, "num_heads = 8: must be divisible by num_groups = 3.*heads 9"),
    (MAMBA | {f"{D}.min_step": -1.0}, "min_step = -1.0: must not be negative"),
    (
        only(KDA) | TRITON,
        "backend = 'triton': .*: there is no kernel for decays of each channel.*backend auto",
    ),
    (
        KERNELS | {"compute.dtype": "float32"},
        "backend = 'triton': .* need bfloat16.*dtype bfloat16",
    ),
    (KERNELS | {f"{D}.chunk": 48}, "chunk = 48: must be 32 or 64 for .*chunk 64"),
    (KERNELS | {f"{D}.key_head_dim": 96}, "key_head_dim = 96: must be 64 or 128.*dim 128"),
    (KERNELS | {f"{D}.value_head_dim": 96}, "value_head_dim = 96: must be a multiple of 64.*128"),
    (
        MAMBA | TRITON | {f"{D}.state_size": 16, f"{D}.head_dim": 64},
        "state_size = 16: must be 64 or 128",
    ),
    (
        {"lora.rank": 5, "lora.targets": ("q_proj", "in_proj")},
        "rank = 5: must be at most 4, the smaller dimension of in_proj",
    ),
    (
        {"parallel.tensor": 4, "model.layers.mixer.num_kv_heads": 4},
        r"delta_layers.mixer.num_key_heads = 2: must be divisible by parallel.tensor = 4",
    ),
    (
        only(KDA) | {"parallel.data": 16, "train.global_batch_size": 16},
        r"value_head_dim = 8: must be divisible by parallel.data = 16",
    ),
]


@pytest.mark.parametrize(("fields", "message"), CASES)
def test_one_error_with_a_fix(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(DELTA_NET, **fields))


def test_kernels_by_name():
    check(replace(DELTA_NET, **KERNELS))


def test_attention_on_latents_may_have_no_positions_beside_a_recurrence():
    latent = LatentAttention(
        num_heads=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8, kv_lora_rank=8, rope=None
    )
    layers = [Layer("kda_layers", KDA, GLU), dataclasses.replace(PERIOD[1], mixer=latent)]
    check(replace(DELTA_NET, **{"model.layers": layers}))
