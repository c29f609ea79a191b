"""DeepSeek's families: the published config.json are the shipped configs; weights in float8."""

import dataclasses
import json
from pathlib import Path

import flax.traverse_util
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar.config import Config, ConfigError, command_line, replace
from jaxpar.convert import selfcheck
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.composed import difference
from jaxpar.convert.hf.config import choose_family, config_json, family_of, model_of
from jaxpar.convert.hf.float8_blocks import Float8Blocks, dequantized
from jaxpar.convert.hf.folder import find_tensors
from jaxpar.convert.hf.tensor_layout import tensor_shape
from jaxpar.convert.peft.exporting import adapter_entries
from jaxpar.convert.safetensors_file import read_header
from jaxpar.model.parameters import param_specs
from jaxpar.model.plain import decoder
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.params import flat
from tests.convert import tiny

FLOAT8 = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
}


def yarn(factor, mscale, **others):
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096} | {
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        **others,
    }


#: Keys of every published config.json of these models.
ALL = {
    "attention_bias": False,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMALL = ALL | {
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
}
LARGE = ALL | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
PUBLISHED = {
    "deepseek_v2_lite": SMALL
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "intermediate_size": 10944,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": yarn(40, 0.707),
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "moonlight_16b_a3b": SMALL
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": 11264,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "vocab_size": 163840,
    },
    "deepseek_v3": LARGE
    | FLOAT8
    | {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "rope_scaling": yarn(40, 1.0),
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "vocab_size": 129280,
    },
    "kimi_k2": LARGE
    | FLOAT8
    | {
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": yarn(32.0, 1.0, beta_fast=1.0, beta_slow=1.0),
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_is_the_published_model(name):
    values = PUBLISHED[name]
    family = family_of(values)
    assert family.model_type == values["model_type"]
    found = model_of(values, family)
    assert found.mtp_depth == values.get("num_nextn_predict_layers", 0)
    shipped = dataclasses.replace(command_line.load_config(name).model, mtp_depth=found.mtp_depth)
    assert difference(found, shipped) is None
    again = config_json(found, family, {}, "bfloat16")
    assert model_of(again, family) == found
    scaling = again["rope_scaling"]
    if scaling is not None:  # for readers that do not know attention_factor
        assert scaling["mscale"] == scaling["mscale_all_dim"] == values["rope_scaling"]["mscale"]
    same = {n: again[n] for n in values if n in again and n not in ("rope_scaling", "torch_dtype")}
    assert not {n for n in same if same[n] != values[n]}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("deepseek_v2_lite", {"topk_method": "group_limited_greedy"}, "topk_method = 'group_li"),
        ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob = True: is not supported"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False: is not supported"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank = None: must be a whole number"),
        ("deepseek_v3", {"q_lora_rank": "x"}, "q_lora_rank = 'x': must be"),
        ("kimi_k2", {"moe_layer_freq": 2}, "moe_layer_freq = 2: is not supported"),
        (
            "kimi_k2",
            {
                "quantization_config": FLOAT8["quantization_config"]
                | {"weight_block_size": [64, 64]}
            },
            "quantization_config = .*is not supported",
        ),
    ],
)
def test_what_is_refused(name, change, said):
    values = PUBLISHED[name] | change
    with pytest.raises(ConfigError, match=said):
        model_of(values, family_of(values))


def test_what_no_family_has_is_exported_to_plain_pytorch():
    m = command_line.load_config("moonlight_16b_a3b").model
    with pytest.raises(ConfigError, match=r"deepseek_v3: model.norm.offset .*Fix: .*`to-torch`"):
        choose_family(dataclasses.replace(m, norm=dataclasses.replace(m.norm, offset=True)))


# ----------------------------------------------------------------------------- float8 by blocks


def as_blocks(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in float8, and a scale for each block of 128 x 128."""
    scales = np.empty([-(-n // 128) for n in a.shape], np.float32)
    values = np.empty(a.shape, ml_dtypes.float8_e4m3fn)
    for i, j in np.ndindex(*scales.shape):
        at = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
        scales[i, j] = np.abs(a[at]).max() / 448
        values[at] = a[at] / scales[i, j]
    return values, scales


def write(folder, arrays: dict) -> None:
    """A safetensors file of arrays of several dtypes."""
    codes = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
    header, at = {}, 0
    for name, a in arrays.items():
        offsets = [at, at + a.nbytes]
        header[name] = {"dtype": codes[a.dtype.name], "shape": a.shape, "data_offsets": offsets}
        at += a.nbytes
    text = json.dumps(header).encode()
    body = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_a_weight_is_its_values_times_the_scale_of_their_block(tmp_path):
    a = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    a[128:, :128] *= 1000
    values, scales = as_blocks(a)
    write(tmp_path, {"w": values, "w_scale_inv": scales})
    (weight,) = dequantized(read_header(tmp_path / "model.safetensors")).values()
    assert isinstance(weight, Float8Blocks) and weight.shape == (200, 300)
    found = weight.open()
    whole = np.kron(scales, np.ones((128, 128), np.float32))[:200, :300]
    wanted = (values.astype(np.float32) * whole).astype(ml_dtypes.bfloat16)
    assert found.tobytes() == wanted.tobytes() and found.nbytes == weight.num_bytes
    off = np.abs(found.astype(np.float32) - a) / np.abs(a).max(axis=(0, 1))
    assert off.max() < 0.04


def quantized(values: dict, change=lambda arrays: None) -> dict:
    """A tiny model as published: matrices of layers in float8, the rest in bfloat16."""
    found = {}
    for name, a in tiny.tensors(values).items():
        if "layers" in name and a.ndim == 2 and "mlp.gate." not in name:
            found[name], found[f"{name}_scale_inv"] = as_blocks(a)
        else:
            exact = name.endswith("correction_bias")
            found[name] = a if exact else a.astype(ml_dtypes.bfloat16)
    change(found)
    return found


VALUES = tiny.MODELS["deepseek_v3_whole"] | FLOAT8 | {"torch_dtype": "bfloat16"}


def test_a_published_model_in_float8_is_exported_in_bfloat16(tmp_path):
    folder = tiny.write_folder(tmp_path / "in", VALUES)
    write(folder, quantized(VALUES))
    source = importing.from_hf(folder, tmp_path / "run", lambda _: None, tolerance=None)
    assert source.config.compute.dtype == "bfloat16"
    exporting.to_hf(exporting.open_export(tmp_path / "run"), tmp_path / "out", lambda _: None)
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in values
    found, published = load_file(tmp_path / "out/model.safetensors"), find_tensors(folder)
    assert found.keys() == published.stored.keys() == tiny.shapes(VALUES).keys()
    for name, array in found.items():
        assert array.tobytes() == np.ascontiguousarray(published.open(name)).tobytes(), name


NAME = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda a: a.pop(NAME + "_scale_inv"), f"{NAME}_scale_inv = None: must be float32 of sh"),
        (lambda a: a.pop(NAME), f"{NAME}_scale_inv = .*is a scale, but {NAME} is no weight"),
        (
            lambda a: a.update({NAME + "_scale_inv": np.ones((2, 1), np.float32)}),
            r"_scale_inv = \[2, 1\]: must be float32 of shape \[1, 1\]",
        ),
    ],
)
def test_a_damaged_folder_is_refused(edit, said, tmp_path):
    folder = tiny.write_folder(tmp_path / "in", VALUES)
    write(folder, quantized(VALUES, edit))
    with pytest.raises(ConfigError, match=said):
        importing.open_source(folder)


# ----------------------------------------------------------------- multi-token prediction

MTP = tiny.MODELS["deepseek_v3_whole"] | {"num_nextn_predict_layers": 1}
COPIES = {
    "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.3.shared_head.head.weight": "lm_head.weight",
}


def with_copies(arrays: dict) -> dict:
    """The tensors as in published files, where a module has copies of embedding and head."""
    return arrays | {name: arrays[of] for name, of in COPIES.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "golden"), [("deepseek_v3_whole", "mtp"), ("glm4_moe", "mtp_glm")]
)
def test_a_module_is_that_of_transformers_and_a_round_trip_is_bitwise(name, golden, tmp_path):
    values = tiny.MODELS[name] | {"num_nextn_predict_layers": 1}
    folder, said = tiny.write_folder(tmp_path / "in", values), []
    arrays = tiny.tensors(values)
    tiny.write_safetensors(folder / "model.safetensors", with_copies(arrays))
    source = importing.from_hf(folder, tmp_path / "run", said.append)
    assert source.config.model.mtp_depth == 1 and source.left_out == tuple(COPIES)
    assert "left out 2 tensors of layers for multi-token prediction" in said
    cfg = replace(source.config, **{"parallel.data": 1})
    read = selfcheck.published_reader(source.entries, source.tensors)
    shapes = {path: spec.shape for path, spec in flat(param_specs(cfg.model)).items()}
    whole = {path: read(path, tuple(slice(0, n) for n in s)) for path, s in shapes.items()}
    params = flax.traverse_util.unflatten_dict(whole, sep="/")
    tokens = tiny.tokens(values).astype(np.int32)
    ones = np.ones_like(tokens)
    batch = Batch(tokens, ones, ones, np.arange(tokens.shape[1], dtype=np.int32)[None])
    with jax.default_matmul_precision("highest"):
        x, _ = decoder.hidden_and_routings(params, batch, cfg)
        ((_, h, _),) = decoder.modules(params, x, batch, cfg)
        found = np.asarray(h[0] @ params["head"])[:-1]
    wanted = np.load(Path(__file__).parent / f"goldens/{golden}.npz")["logits"]
    assert wanted.shape == (tiny.NUM_TOKENS - 1, 64) and np.abs(wanted).max() > 1
    assert np.abs(found - wanted).max() <= 1e-5
    exporting.to_hf(exporting.open_export(tmp_path / "run"), tmp_path / "out", said.append, None)
    again = load_file(tmp_path / "out/model.safetensors")
    assert again.keys() == arrays.keys()
    assert all(again[n].tobytes() == arrays[n].tobytes() for n in arrays)
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_module_with_an_embedding_of_its_own_is_refused(tmp_path):
    folder = tiny.write_folder(tmp_path / "in", MTP)
    arrays = with_copies(tiny.tensors(MTP))
    name = next(iter(COPIES))
    arrays[name] = arrays[name] + np.float32(1)
    tiny.write_safetensors(folder / "model.safetensors", arrays)
    with pytest.raises(ConfigError, match=f"{name} = .*must be a copy of model.embed_tokens"):
        importing.open_source(folder)


def test_modules_that_the_files_lack_are_not_imported(tmp_path):
    folder, said = tiny.write_folder(tmp_path / "in", MTP), []
    arrays = tiny.tensors(MTP | {"num_nextn_predict_layers": 0})
    tiny.write_safetensors(folder / "model.safetensors", arrays)
    source = importing.from_hf(folder, tmp_path / "run", said.append, tolerance=None)
    assert source.config.model.mtp_depth == 0
    assert said[0].startswith("config.json has num_nextn_predict_layers 1, but the files have no")


def test_adapters_of_latent_attention_have_the_shapes_of_peft():
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    m = command_line.load_config("deepseek_v3").model
    cfg = replace(Config(model=m), **{"lora.rank": 4, "lora.targets": targets})
    family = family_of(PUBLISHED["deepseek_v3"])
    specs = flat(param_specs(m, cfg.lora))
    found = {entry.path: entry for entry in adapter_entries(family, cfg)}
    assert found.keys() == {path for path in specs if "_lora_" in path}
    for path, entry in found.items():
        assert entry.shape == specs[path].shape, path
    wide = found["layers/wo_lora_a"]
    assert wide.name == "base_model.model.model.layers.{L}.self_attn.o_proj.lora_A.weight"
    assert tensor_shape(wide) == (4, 128 * 128)
