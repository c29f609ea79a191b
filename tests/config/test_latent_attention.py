"""Rules about multi-head latent attention: each is one error, with a fix that mends it."""

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.validate import check

GOOD = replace(
    Config(),
    **{
        "model.num_kv_heads": 8,
        "model.head_dim": 48,
        "model.kv_lora_rank": 64,
        "model.qk_rope_head_dim": 16,
        "model.v_head_dim": 32,
    },
)


def test_what_may_be():
    check(GOOD)
    check(replace(GOOD, **{"model.q_lora_rank": 96, "compute.matmul_dtype": "float8"}))
    assert GOOD.model.rotary_dims == 16 and GOOD.model.qk_nope_head_dim == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 0}, r"qk_rope_head_dim = 16: needs multi-head latent attention"),
        ({"num_kv_heads": 4}, r"num_kv_heads = 4: must be model.num_heads = 8.*-heads 8"),
        ({"q_lora_rank": 0}, r"q_lora_rank = 0: must be at least 1, or None"),
        ({"qk_rope_head_dim": 15}, r"= 15: must be even.*-dim 16"),
        ({"qk_rope_head_dim": 48}, r"= 48: must be below model.head_dim = 48"),
        ({"v_head_dim": 49}, r"v_head_dim = 49: must be at most model.head_dim = 48"),
        ({"latent_norm_eps": 0.0}, r"latent_norm_eps = 0.0: must be above 0"),
        ({"qk_norm": True}, r"qk_norm = True: does not apply with model.kv_lora_rank = 64"),
        ({"qkv_bias": True}, r"qkv_bias = True: does not apply.*no biases"),
        ({"out_bias": True}, r"out_bias = True: does not apply.*no biases"),
        ({"rope_fraction": 0.5}, r"rope_fraction = 0.5: does not apply"),
        ({"query_scale_dim": 8}, r"query_scale_dim = 8: does not apply"),
        ({"attention_softcap": 50.0}, r"attention_softcap = 50.0: does not apply"),
        ({"attention_multiplier": 0.5}, r"attention_multiplier = 0.5: does not apply"),
        (
            {"rope_scaling.kind": "yarn", "rope_scaling.query_beta": 0.1},
            r"query_beta = 0.1: does not apply",
        ),
        ({"attention_gate": True}, r"attention_gate = True: does not apply"),
        ({"attention_sinks": True}, r"attention_sinks = True: does not apply"),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(GOOD, **{f"model.{name}": value for name, value in fields.items()}))


def test_latents_in_float8():
    cfg = replace(GOOD, **{"compute.matmul_dtype": "float8", "model.kv_lora_rank": 72})
    with pytest.raises(ConfigError, match=r"kv_lora_rank = 72.*divisible by 16"):
        check(cfg)


def test_latents_are_sharded():
    cfg = replace(GOOD, **{"parallel.data": 3, "model.d_model": 96, "train.global_batch_size": 9})
    with pytest.raises(ConfigError, match=r"kv_lora_rank = 64: must be divisible by .*data = 3"):
        check(cfg)


@pytest.mark.parametrize("target", ["k_proj", "q_a_proj"])
def test_adapters_of_other_attention(target):
    cfg = replace(GOOD, **{"lora.rank": 4, "lora.targets": f"o_proj,{target}"})
    with pytest.raises(ConfigError, match="must be names from kv_a_proj_with_mqa, q_proj, kv_b"):
        check(cfg)


def test_factors_of_scores_need_latent_attention():
    cfg = replace(
        Config(), **{"model.rope_scaling.kind": "yarn", "model.rope_scaling.mscale_all_dim": 1.0}
    )
    with pytest.raises(ConfigError, match=r"mscale_all_dim = 1.0: needs multi-head latent"):
        check(cfg)
