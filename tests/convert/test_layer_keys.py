"""RoPE and windows in config.json: each form says the same, and what is written is read back."""

from dataclasses import replace

import pytest

from jaxpar.config import ConfigError, Layer, Model, Rope, RopeScaling
from jaxpar.convert.hf.composed import Composition
from jaxpar.convert.hf.config import config_json, family_of, model_of
from jaxpar.convert.hf.families import GEMMA3, GEMMA4, LLAMA, OLMO_HYBRID, QWEN2, QWEN3_MOE
from jaxpar.convert.hf.keys import layers
from tests.convert import tiny
from tests.tiny import ATTENTION, GLU

SCALED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALING = RopeScaling(factor=32.0)


def rope_of(model: Model):
    """The theta and the scaling of the first layer."""
    rope = model.layers[0].mixer.rope
    return rope.theta, rope.scaling


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, (10_000.0, None)),
        ({"rope_theta": 5e5, "rope_scaling": None}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": SCALED}, (5e5, SCALING)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, (5e5, None)),
        ({"rope_parameters": SCALED | {"rope_theta": 5e5}}, (5e5, SCALING)),
        # The current form decides where a file has both.
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1.0}, (5e5, None)),
    ],
)
def test_rope_forms(values, wanted):
    drafts, _ = layers.read(values, LLAMA, 2)
    rope = drafts[1].own["rope"]
    assert (rope.theta, rope.scaling) == wanted


@pytest.mark.parametrize(
    ("name", "theta"), [("llama2", 1e4), ("mistral", 1e4), ("mixtral", 1e6), ("qwen3_moe", 1e4)]
)
def test_a_base_that_is_left_out_is_the_familys(name, theta):
    values = {k: v for k, v in tiny.MODELS[name].items() if k != "rope_theta"}
    family = family_of(values)
    assert rope_of(model_of(values, family))[0] == theta
    assert rope_of(model_of(values | {"rope_theta": 5e5}, family))[0] == 5e5
    current = {"rope_parameters": {"rope_type": "default"}}
    assert rope_of(model_of(values | current, family))[0] == theta


LOCAL, FULL = "sliding_attention", "full_attention"
TWO_ROPES = {FULL: {"rope_theta": 1e6}, LOCAL: {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    "values",
    [
        {"sliding_window": 8, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {"sliding_window": 8, "layer_types": None, "rope_parameters": TWO_ROPES},
        {"sliding_window": 8, "layer_types": [LOCAL] * 5 + [FULL] + [LOCAL] * 2},
    ],
)
def test_layers_of_two_kinds(values):
    drafts, _ = layers.read(GEMMA3.defaults | values, GEMMA3, 8)
    assert [draft.own.get("window") for draft in drafts] == [8] * 5 + [None] + [8] * 2
    assert [draft.own["rope"].theta for draft in drafts] == [1e4] * 5 + [1e6] + [1e4] * 2


@pytest.mark.parametrize("name", tiny.MODELS)
def test_what_is_written_is_read_back(name):

    values = tiny.MODELS[name]
    family = family_of(values)
    model = model_of(values, family)
    written = config_json(model, family, {}, "float32")
    assert model_of(written, family) == model
    current = "per_layer_config" if family.global_heads else "rope_parameters"
    older = {k: v for k, v in written.items() if k != current}
    if name == "olmo3":  # transformers 5 reads one base of the older form as that of full attention
        with pytest.raises(ConfigError, match=r"rope_theta = 10000.0: .*write both bases"):
            model_of(older, family)
    else:
        assert model_of(older, family) == model


WIDE = Layer("global_layers", ATTENTION, GLU)
NEAR = Layer("layers", replace(ATTENTION, window=8), GLU)
OTHER = Layer("layers", replace(ATTENTION, window=8, rope=Rope(theta=1e3)), GLU)


@pytest.mark.parametrize(
    "given",
    [[WIDE] * 8, [NEAR] * 8, [*[OTHER, OTHER, WIDE] * 2, OTHER, OTHER], [NEAR, WIDE] * 4],
)
def test_gemmas_layers_are_read_back(given):
    of = Composition(Model(d_model=16, vocab_size=48, layers=given))
    drafts, _ = layers.read(layers.write(of, GEMMA3), GEMMA3, 8)
    assert [draft.own.get("window") for draft in drafts] == [a.window for a in of.mixers]
    assert [draft.own["rope"] for draft in drafts] == [a.rope for a in of.mixers]


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        (GEMMA3, {"layer_types": [LOCAL, FULL, FULL, LOCAL]}, "layer_types.*not a repeating"),
        (GEMMA3, {"rope_scaling": {"rope_type": "linear"}}, "factor = None: must be a number"),
        (
            GEMMA3,
            {"rope_parameters": {LOCAL: SCALED}, "sliding_window_pattern": 2},
            f"{LOCAL} = 'llama3': is not that of {FULL}",
        ),
        (GEMMA3, {"rope_parameters": {FULL: 5}}, f"rope_parameters {FULL} = 5: must be an object"),
        (GEMMA3, {"rope_parameters": {FULL: {}, LOCAL: [1]}}, f"{LOCAL} = .*must be an object"),
        (GEMMA3, {"sliding_window_pattern": -1}, "sliding_window_pattern = -1: must be 1 or more"),
        (GEMMA3, {"sliding_window_pattern": None}, "sliding_window_pattern = None: must be 1"),
        (LLAMA, {"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta = '1e6': must be a number"),
        (GEMMA3, {"layer_types": [FULL] * 3}, "names 3 layers, but num_hidden_layers is 4"),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": [LOCAL] * 5},
            "layer_types = .*names 5 layers",
        ),
        (QWEN2, {"layer_types": []}, r"layer_types = \[\]: names 0 layers"),
        (LLAMA, {"rope_theta": 0}, "rope_theta = 0: must be above 0"),
        (LLAMA, {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 0.0}}, "rope_theta = 0.0: m"),
        (LLAMA, {"rope_theta": 10**400}, "rope_theta = 1000.*: must be above 0, and finite"),
        (LLAMA, {"rope_theta": float("nan")}, "rope_theta = nan: must be above 0"),
        (GEMMA3, {"rope_local_base_freq": 0}, "rope_local_base_freq = 0: must be above 0"),
        (GEMMA3, {"rope_parameters": {LOCAL: {"rope_theta": 0}}}, "rope_theta = 0: must be above"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 2}, "some layers only"),
    ],
)
def test_what_ours_cannot_express(family, values, said):
    with pytest.raises(ConfigError, match=said):
        layers.read(family.defaults | values, family, 4)


def test_the_other_name_of_the_number_of_experts():
    values = {k: v for k, v in tiny.MODELS["qwen3_moe"].items() if k != "num_experts"}
    assert (
        model_of(values | {"num_local_experts": 5}, QWEN3_MOE).layers[0].feed_forward.num_experts
        == 5
    )


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2.*use a model with 1"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1: .*could not be trained"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("gemma4", {"hidden_size_per_layer_input": 256}, "layer_input = 256: .*use a model with 0"),
        ("gemma4", {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2: .*use a model with 0"),
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block = True: .*use a model with False"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "attention = 'all': lets text attend"),
        ("gemma4", {"layer_types": [LOCAL] * 4}, "must name 4 layers, .* some of each, the last"),
        ("gemma4", {"layer_types": [LOCAL, FULL] * 3}, "layer_types = .*: must name 4 layers"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, "config = .*: must have the same"),
        (
            "gemma4",
            {"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 16}}},
            "must have the same head_dim and num_key_value_heads for each layer of full_attention",
        ),
        (
            "gemma4",
            {"rope_parameters": TWO_ROPES | {FULL: {"partial_rotary_factor": 0.5}}},
            "full_attention = 0.5: turns a part of each head.*proportional",
        ),
        ("olmo_hybrid", {"rope_parameters": None}, "rope_parameters = None: does not say whether"),
        ("olmo_hybrid", {"layer_types": ["full_attention"] * 3}, "must have layers with full_"),
        (
            "nemotron_3",
            {"hybrid_override_pattern": "EE*E-"},
            r"and of experts \(E\), and no other b",
        ),
        ("nemotron_3", {"hybrid_override_pattern": "ME*E"}, "for each of num_hidden_layers = 5"),
        ("nemotron_3", {"moe_latent_size": 16}, "moe_latent_size = 16: is not supported"),
        (
            "nemotron_3",
            {"moe_shared_expert_intermediate_size": 50},
            "moe_shared_expert_intermediate_size = 50: must be a multiple of moe_intermediate_size",
        ),
    ],
)
def test_keys_that_change_the_function(name, values, said):
    values = tiny.MODELS[name] | values
    with pytest.raises(ConfigError, match=said):
        model_of(values, family_of(values))


def test_heads_of_global_layers():
    values = tiny.MODELS["gemma4"]
    one = {"head_dim": 16, "num_key_value_heads": 1}
    current = {k: v for k, v in values.items() if "global" not in k}
    current |= {"per_layer_config": {"1": one, "3": one}}
    assert model_of(current, GEMMA4) == model_of(values, GEMMA4)
    # Their number counts only where values are keys; a width of 512 may be left out.
    local, wide, *_ = model_of(values | {"attention_k_eq_v": False}, GEMMA4).layers
    assert (wide.mixer.num_kv_heads, wide.mixer.keys_as_values) == (2, False)
    assert local.mixer.num_kv_heads == 2
    m = model_of({k: v for k, v in values.items() if k != "global_head_dim"}, GEMMA4)
    assert [layer.mixer.head_dim for layer in m.layers] == [8, 512, 8, 512]
    m = model_of(values | {"use_bidirectional_attention": "vision"}, GEMMA4)
    assert m == model_of(values, GEMMA4)
    left_out = {k: v for k, v in values.items() if k not in ("layer_types", "rope_parameters")}
    m = model_of(left_out | {"num_hidden_layers": 12}, GEMMA4)
    assert [layer.name for layer in m.layers] == (["layers"] * 5 + ["global_layers"]) * 2
    local, wide = m.layers[0].mixer.rope, m.layers[5].mixer.rope
    assert (local.theta, local.scaling, wide.theta) == (1e4, None, 1e6)
    assert wide.scaling == RopeScaling(kind="proportional", factor=1.0, turning=0.25)


def test_a_rotary_embedding_or_none():
    values = tiny.MODELS["olmo_hybrid"]
    given = (
        ({"rope_theta": None}, False),
        ({"rope_type": None}, False),
        ({"rope_theta": 1e4, "rope_type": "default"}, True),
    )
    for rope, has in given:
        model = model_of(values | {"rope_parameters": rope}, OLMO_HYBRID)
        assert (model.layers[1].mixer.rope is not None) is has
        assert model_of(config_json(model, OLMO_HYBRID, {}, "float32"), OLMO_HYBRID) == model


def test_layers_by_letters_or_by_names():
    """As transformers 5 writes them, without their number."""
    values = dict(tiny.MODELS["nemotron_3"])
    wanted = model_of(values, family_of(values))
    del values["hybrid_override_pattern"], values["num_hidden_layers"]
    values["layers_block_type"] = ["linear_attention", "moe", "full_attention", "moe", "mlp"]
    assert model_of(values, family_of(values)) == wanted
