"""Kimi Linear's config.json: as published, as transformers saves it, and what is refused."""

import re

import pytest

from jaxpar.components.rope import Rope
from jaxpar.config import ConfigError
from jaxpar.config.command_line import load_config
from jaxpar.config.layers import with_value
from jaxpar.convert.hf.composed import difference
from jaxpar.convert.hf.config import config_json, model_of, why_not
from jaxpar.convert.hf.families import KIMI_LINEAR
from tests.convert.tiny_models import MODELS

VALUES = MODELS["kimi_linear"]
LINEAR = VALUES["linear_attn_config"]

#: What the file of Kimi-Linear-48B-A3B-Base has.
PUBLISHED = VALUES | {
    "hidden_size": 2304,
    "head_dim": 72,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "dtype": "bfloat16",
}


def test_the_published_file_is_the_shipped_config():
    shipped = load_config("kimi_linear_48b_a3b").model
    assert difference(model_of(PUBLISHED, KIMI_LINEAR), shipped) is None
    written = config_json(shipped, KIMI_LINEAR, {}, "bfloat16")
    same = {key for key in PUBLISHED if written.get(key) == PUBLISHED[key]}
    assert same >= {"linear_attn_config", "first_k_dense_replace", "num_experts_per_token"}


def test_the_form_of_transformers():
    """It names the mixer and the feed-forward of each layer."""
    named = {"full": "full_attention", "kda": "linear_attention"}
    saved = {key: value for key, value in VALUES.items() if key != "linear_attn_config"} | {
        "layer_types": [named[n] for n in ("kda", "kda", "full", "kda", "full")],
        "mlp_layer_types": ["dense"] + ["sparse"] * 4,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    del saved["first_k_dense_replace"]
    assert model_of(saved, KIMI_LINEAR) == model_of(VALUES, KIMI_LINEAR)
    names = [layer.name for layer in model_of(VALUES, KIMI_LINEAR).layers]
    assert names == ["kda_dense_layers", "kda_layers", "layers", "kda_layers", "layers"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"linear_attn_config": LINEAR | {"kda_layers": [1, 2]}}, "must have each of .* = 5 la"),
        ({"linear_attn_config": LINEAR | {"kda_layers": [1, 2, 3]}}, "must have each of .*once"),
        ({"linear_attn_config": LINEAR | {"kda_layers": "1"}}, "must have each of"),
        ({"linear_attn_config": LINEAR | {"num_heads": None}}, "num_heads = None: must be a who"),
        ({"linear_attn_config": [1]}, "linear_attn_config = .*must be an object"),
        (
            {"linear_attn_config": LINEAR | {"gate_lower_bound": -5.0}},
            "gate_lower_bound = -5.0: is not supported",
        ),
        ({"first_k_dense_replace": 3}, "= 3: makes layer 3 dense, which has attention"),
        ({"first_k_dense_replace": "1"}, "= '1': must be an integer"),
        ({"mlp_layer_types": ["dense", "none"]}, "must name dense or sparse"),
        ({"layer_types": ["linear_attention"]}, "must name full_attention or linear_attention"),
        ({"layer_types": ["linear_attention"] * 5}, "must have layers with Kimi Delta Attention"),
        ({"mla_use_nope": False}, "mla_use_nope = False: is not supported"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate = True: is not supported"),
        ({"hidden_act": "situ"}, "hidden_act = 'situ': is not supported"),
        ({"kv_lora_rank": None}, "kv_lora_rank = None: must be a whole number"),
    ],
)
def test_one_error_with_the_key(changed, message):
    with pytest.raises(ConfigError, match=message):
        model_of(VALUES | changed, KIMI_LINEAR)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda x: with_value(x, "model.kda_layers.mixer.value_head_dim", 16),
            "value_head_dim = 16, but its models have 8",
        ),
        (lambda x: (x[1], x[0], *x[2:]), "a dense feed-forward come first"),
        (
            lambda x: with_value(x, "model.kda_layers.mixer", None),
            "linear_attn_config would be .*, which must have layers with Kimi Delta Attention",
        ),
        (
            lambda x: with_value(x, "model.layers.mixer.rope", Rope()),
            "rope = Rope, but its models have None",
        ),
    ],
)
def test_models_that_the_family_cannot_express(change, reason):
    m = model_of(VALUES, KIMI_LINEAR)
    assert why_not(KIMI_LINEAR, m) is None
    found = why_not(KIMI_LINEAR, m.with_layers(change(m.layers)))
    assert found is not None and re.search(reason, found), found
