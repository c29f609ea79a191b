"""Rules about multi-head latent attention: each is one error, with a fix that mends it."""

import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.validate import check
from tests.config.models import BASE, LATENT

GOOD = replace(BASE, **{"model.layers.mixer": LATENT})
MIXER = "model.layers.mixer"


def test_what_may_be():
    check(GOOD)
    check(replace(GOOD, **{f"{MIXER}.q_lora_rank": 96, "compute.matmul_dtype": "float8"}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 0}, r"kv_lora_rank = 0: must be at least 1"),
        ({"q_lora_rank": 0}, r"q_lora_rank = 0: must be at least 1"),
        ({"qk_rope_head_dim": 15}, r"= 15: must be even.*-dim 16"),
        ({"qk_nope_head_dim": 0}, r"qk_nope_head_dim = 0: must be at least 1"),
        ({"v_head_dim": 49}, r"v_head_dim = 49: must be at most .*qk_rope_head_dim = 48"),
        ({"norm_eps": 0.0}, r"norm_eps = 0.0: must be above 0"),
        ({"rope.fraction": 0.5}, r"rope.fraction = 0.5: must be 1"),
        (
            {"rope.scaling.kind": "yarn", "rope.scaling.query_beta": 0.1},
            r"query_beta = 0.1: must be 0",
        ),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(GOOD, **{f"{MIXER}.{name}": value for name, value in fields.items()}))


#: What attention without latents has.
OF_OTHERS = "num_kv_heads qk_norm bias out_bias scale_dim softcap scale gate sinks value_norm"


@pytest.mark.parametrize("name", OF_OTHERS.split())
def test_what_other_attention_has_is_no_field(name):
    with pytest.raises(ConfigError, match=rf"mixer\.{name} = .*is not a field of the config"):
        replace(GOOD, **{f"{MIXER}.{name}": 1})


def test_latents_in_float8():
    cfg = replace(GOOD, **{"compute.matmul_dtype": "float8", f"{MIXER}.kv_lora_rank": 72})
    with pytest.raises(ConfigError, match=r"kv_lora_rank = 72.*divisible by 16"):
        check(cfg)


def test_latents_are_sharded():
    cfg = replace(GOOD, **{"parallel.data": 3, "model.d_model": 96, "train.global_batch_size": 9})
    with pytest.raises(ConfigError, match=r"kv_lora_rank = 64: must be divisible by .*data = 3"):
        check(cfg)


@pytest.mark.parametrize("target", ["k_proj", "q_a_proj"])
def test_adapters_of_other_attention(target):
    cfg = replace(GOOD, **{"lora.rank": 4, "lora.targets": ("o_proj", target)})
    with pytest.raises(ConfigError, match="must be names from kv_a_proj_with_mqa, q_proj, kv_b"):
        check(cfg)


def test_factors_of_scores_need_latent_attention():
    yarn = {f"{MIXER}.rope.scaling.kind": "yarn", f"{MIXER}.rope.scaling.mscale_all_dim": 1.0}
    check(replace(GOOD, **yarn))
    with pytest.raises(ConfigError, match=r"mscale_all_dim = 1.0: needs latent attention"):
        check(replace(BASE, **yarn))
