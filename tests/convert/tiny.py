"""Tiny models of each family, as published: config.json by hand, weights by NumPy's generator.

`goldens/make_hf_goldens.py` writes the same folders, with `transformers` beside it, in another
environment: only NumPy and the standard library are used here.
"""

import json
import struct
import zlib
from pathlib import Path

import numpy as np

from tests.convert import tiny_gemma4, tiny_gpt, tiny_kimi
from tests.convert.tiny_models import MODELS
from tests.convert.tiny_ropes import ROPES  # noqa: F401

#: Tokens that logits are compared on.
NUM_TOKENS = 304

#: Of them, the prompts that greedy text goes on from, the longest past every window; and how far.
PROMPTS, NUM_GREEDY = ((0, 80), (80, 89), (90, 91), (100, 148), (150, 170), (200, 263)), 20


#: Families with a norm of each head's queries and keys.
WITH_QK_NORM = ("qwen3", "qwen3_moe", "dots1", "glm4_moe", "gemma3_text", "qwen3_next")
WITH_QK_NORM += ("qwen3_5_text",)

#: Families whose norms hold what is added to 1.
OFFSET = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text")


def shapes(values: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as the family's published files have them."""
    if values["model_type"] in ("gpt2", "gpt_neox", "starcoder2"):
        return tiny_gpt.shapes(values)
    if values["model_type"] == "gemma4_text":
        return tiny_gemma4.shapes(values)
    if values["model_type"] == "kimi_linear":
        return tiny_kimi.shapes(values)
    kind, D = values["model_type"], values["hidden_size"]
    if kind == "nemotron_h":
        return _nemotron_h(values)
    H = values["num_attention_heads"]
    G = values["num_key_value_heads"] or H
    K, F, V = values.get("head_dim", D // H), values["intermediate_size"], values["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for i in range(values["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        recurs = values.get("layer_types", [""] * (i + 1))[i] == "linear_attention"
        projections = {"q_proj": (H * K, D), "k_proj": (G * K, D), "v_proj": (G * K, D)}
        if kind == "phi3":
            projections = {"qkv_proj": ((H + 2 * G) * K, D)}
        projections["o_proj"] = (D, H * K)
        if "kv_lora_rank" in values:
            projections, norms = _latents(values, D, H)
            found |= {f"{layer}self_attn.{name}.weight": shape for name, shape in norms.items()}
        biased = {"qwen2": ("q_proj", "k_proj", "v_proj")}.get(kind, ())
        if values.get("attention_bias"):
            biased = tuple(n for n in projections if kind != "glm4_moe" or n != "o_proj")
        if recurs:
            found |= _linear_attention(layer, values)
            projections = {}
        elif kind in ("qwen3_next", "qwen3_5_text"):
            projections["q_proj"] = (2 * H * K, D)
        if not kind.startswith("olmo") or kind == "olmoe" or recurs:
            found[layer + "input_layernorm.weight"] = (D,)
        for name, shape in projections.items():
            found[f"{layer}self_attn.{name}.weight"] = shape
            if name in biased:
                found[f"{layer}self_attn.{name}.bias"] = shape[:1]
        if projections and kind in WITH_QK_NORM:
            found |= {f"{layer}self_attn.{n}_norm.weight": (K,) for n in "qk"}
        if kind == "gpt_oss":
            found[layer + "self_attn.sinks"] = (H,)
        if kind.startswith("olmo") and not recurs:
            wide = {"q": (H * K,), "k": (G * K,)}
            found |= {f"{layer}self_attn.{n}_norm.weight": shape for n, shape in wide.items()}
        found[layer + "post_attention_layernorm.weight"] = (D,)
        if kind == "gemma2":
            found |= {f"{layer}{n}_feedforward_layernorm.weight": (D,) for n in ("pre", "post")}
        if kind in ("olmo2", "olmo3", "olmo_hybrid") and not recurs:
            found[layer + "post_feedforward_layernorm.weight"] = (D,)
        if kind == "gemma3_text":
            found |= {f"{layer}{n}_feedforward_layernorm.weight": (D,) for n in ("pre", "post")}
        found |= _mlp(layer, values, D, F)
    for i in range(values.get("num_nextn_predict_layers", 0)):
        found |= _module(values, f"model.layers.{values['num_hidden_layers'] + i}.", D)
    found["model.norm.weight"] = (D,)
    if not values["tie_word_embeddings"]:
        found["lm_head.weight"] = (V, D)
    return found


def _nemotron_h(values: dict) -> dict[str, tuple[int, ...]]:
    D, V, F = (values[key] for key in ("hidden_size", "vocab_size", "intermediate_size"))
    H, G, K = values["num_attention_heads"], values["num_key_value_heads"], values["head_dim"]
    t, p = values["mamba_num_heads"], values["mamba_head_dim"]
    mixed = t * p + 2 * values["n_groups"] * values["ssm_state_size"]
    of_kind = {
        "M": {
            "in_proj.weight": (t * p + mixed + t, D),
            "conv1d.weight": (mixed, 1, values["conv_kernel"]),
            "conv1d.bias": (mixed,),
            "norm.weight": (t * p,),
            "out_proj.weight": (D, t * p),
        }
        | dict.fromkeys(("A_log", "dt_bias", "D"), (t,)),
        "*": {
            "q_proj.weight": (H * K, D),
            "k_proj.weight": (G * K, D),
            "v_proj.weight": (G * K, D),
            "o_proj.weight": (D, H * K),
        },
        "-": {"up_proj.weight": (F, D), "down_proj.weight": (D, F)},
        "E": _experts_without_gate(values, D),
    }
    found: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (V, D)}
    for i, letter in enumerate(values["hybrid_override_pattern"]):
        layer = f"backbone.layers.{i}."
        found[layer + "norm.weight"] = (D,)
        found |= {f"{layer}mixer.{name}": shape for name, shape in of_kind[letter].items()}
    return found | {"backbone.norm_f.weight": (D,), "lm_head.weight": (V, D)}


def _experts_without_gate(values: dict, D: int) -> dict[str, tuple[int, ...]]:
    """Nemotron 3's: two matrices each, and a shared one of its own width."""
    if "n_routed_experts" not in values:
        return {}
    E, F = values["n_routed_experts"], values["moe_intermediate_size"]
    S = values["moe_shared_expert_intermediate_size"]
    found = _experts("", E, D, {"up_proj": (F, D), "down_proj": (D, F)})
    shared = {"up_proj": (S, D), "down_proj": (D, S)}
    found |= {f"shared_experts.{name}.weight": shape for name, shape in shared.items()}
    return found | {"gate.e_score_correction_bias": (E,)}


def _module(values: dict, layer: str, D: int) -> dict[str, tuple[int, ...]]:
    """A layer for multi-token prediction as DeepSeek-V3 has, without copies of other tensors."""
    last = f"model.layers.{values['num_hidden_layers'] - 1}."
    alike = shapes(values | {"num_nextn_predict_layers": 0})
    found = {layer + n.removeprefix(last): s for n, s in alike.items() if n.startswith(last)}
    found |= {layer + n + ".weight": (D,) for n in ("enorm", "hnorm", "shared_head.norm")}
    return found | {layer + "eh_proj.weight": (D, 2 * D)}


def _linear_attention(layer: str, values: dict) -> dict[str, tuple[int, ...]]:
    D, linear = values["hidden_size"], layer + "linear_attn."
    g, h = values["linear_num_key_heads"], values["linear_num_value_heads"]
    k, v = values["linear_key_head_dim"], values["linear_value_head_dim"]
    mixed = 2 * g * k + h * v
    if values["model_type"] == "olmo_hybrid":
        width = {"q": g * k, "k": g * k, "v": h * v, "g": h * v, "a": h, "b": h}
        convolved = (1, values["linear_conv_kernel_dim"])
        found = {f"{n}_proj.weight": (size, D) for n, size in width.items()}
        found |= {f"{n}_conv1d.weight": (width[n], *convolved) for n in "qkv"}
        found |= {
            "A_log": (h,),
            "dt_bias": (h,),
            "o_norm.weight": (v,),
            "o_proj.weight": (D, h * v),
        }
        return {linear + name: shape for name, shape in found.items()}
    found = {
        "conv1d.weight": (mixed, 1, values["linear_conv_kernel_dim"]),
        "A_log": (h,),
        "dt_bias": (h,),
        "norm.weight": (v,),
        "out_proj.weight": (D, h * v),
    }
    if values["model_type"] == "qwen3_next":
        found |= {"in_proj_qkvz.weight": (mixed + h * v, D), "in_proj_ba.weight": (2 * h, D)}
    else:
        found |= {"in_proj_qkv.weight": (mixed, D), "in_proj_z.weight": (h * v, D)}
        found |= {f"in_proj_{n}.weight": (h, D) for n in "ba"}
    return {linear + name: shape for name, shape in found.items()}


def _latents(values: dict, D: int, H: int) -> tuple[dict, dict]:
    """Shapes of multi-head latent attention's matrices, and of its norms."""
    C, R, N, I = (  # noqa: E741
        values[key]
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    matrices = {"kv_a_proj_with_mqa": (C + R, D), "kv_b_proj": (H * (N + I), C)}
    matrices["o_proj"] = (D, H * I)
    norms = {"kv_a_layernorm": (C,)}
    if (Q := values["q_lora_rank"]) is None:
        return matrices | {"q_proj": (H * (N + R), D)}, norms
    matrices |= {"q_a_proj": (Q, D), "q_b_proj": (H * (N + R), Q)}
    return matrices, norms | {"q_a_layernorm": (Q,)}


def _mlp(layer: str, values: dict, D: int, F: int) -> dict[str, tuple[int, ...]]:
    if values["model_type"] == "gpt_oss":
        E, moe = values["num_local_experts"], layer + "mlp."
        found: dict[str, tuple[int, ...]] = {
            moe + "router.weight": (E, D),
            moe + "router.bias": (E,),
        }
        found |= {moe + "experts.gate_up_proj": (E, D, 2 * F), moe + "experts.down_proj": (E, F, D)}
        bias = {"experts.gate_up_proj_bias": (E, 2 * F), "experts.down_proj_bias": (E, D)}
        return found | {moe + name: shape for name, shape in bias.items()}
    if values["model_type"] == "llama4_text":
        E, moe = values["num_local_experts"], layer + "feed_forward."
        if (int(layer.split(".")[2]) + 1) % values["interleave_moe_layer_step"]:
            F = values["intermediate_size_mlp"]
            of = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
            return {f"{moe}{name}.weight": shape for name, shape in of.items()}
        of = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
        found = {moe + "router.weight": (E, D), moe + "experts.gate_up_proj": (E, D, 2 * F)}
        found |= {f"{moe}shared_expert.{name}.weight": shape for name, shape in of.items()}
        return found | {moe + "experts.down_proj": (E, F, D)}
    if values["model_type"] == "mixtral":
        moe, of = layer + "block_sparse_moe.", {"w1": (F, D), "w2": (D, F), "w3": (F, D)}
        return _experts(moe, values["num_local_experts"], D, of)
    if values["model_type"] in ("qwen3_moe", "qwen3_next"):
        F = values["moe_intermediate_size"]
        of = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
        found = _experts(layer + "mlp.", values["num_experts"], D, of)
        if values["model_type"] == "qwen3_moe":
            return found
        found |= {f"{layer}mlp.shared_expert.{name}.weight": shape for name, shape in of.items()}
        return found | {layer + "mlp.shared_expert_gate.weight": (1, D)}
    sigmoid = values["model_type"] in ("dots1", "glm4_moe", "deepseek_v3")
    if (sigmoid or values["model_type"] == "deepseek_v2") and int(layer.split(".")[2]) > 0:
        F, E = values["moe_intermediate_size"], values["n_routed_experts"]
        of = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
        S = values["n_shared_experts"] * F
        wide = {"gate_proj": (S, D), "up_proj": (S, D), "down_proj": (D, S)}
        found = _experts(layer + "mlp.", E, D, of)
        found |= {f"{layer}mlp.shared_experts.{name}.weight": s for name, s in wide.items()}
        bias = {layer + "mlp.gate.e_score_correction_bias": (E,)}
        return found | bias if sigmoid else found
    of = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    if values["model_type"] == "phi3":
        of = {"gate_up_proj": (2 * F, D), "down_proj": (D, F)}
    if values["model_type"] == "olmoe":
        return _experts(layer + "mlp.", values["num_experts"], D, of)
    found = {f"{layer}mlp.{name}.weight": shape for name, shape in of.items()}
    if values.get("mlp_bias"):
        found |= {f"{layer}mlp.{name}.bias": shape[:1] for name, shape in of.items()}
    return found


def _experts(moe: str, count: int, D: int, of: dict) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {moe + "gate.weight": (count, D)}
    for e in range(count):
        found |= {f"{moe}experts.{e}.{name}.weight": shape for name, shape in of.items()}
    return found


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's float32 values, a function of its name: norms about 1, the rest about 0."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    of_norms = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight", "norm_f.weight")
    of_norms += ("layer_scalar",)
    near_one = name.endswith(of_norms)
    # A recurrence's norm divides by the length of its output, which small values make 0.
    scale = 1.0 if name.endswith(("sinks", "conv1d.weight")) else 0.15
    # OLMo Hybrid's has a small eps: with larger weights, transformers is off by 2e-5 from float64.
    scale = 0.05 if name.endswith("linear_attn.o_proj.weight") else scale
    return (1 + 0.2 * values if near_one else scale * values).astype(np.float32)


def tensors(values: dict) -> dict[str, np.ndarray]:
    """Every tensor of a model; the norms of some families hold what is added to 1."""
    offset = np.float32(values["model_type"] in OFFSET)
    found = {name: tensor(name, shape) for name, shape in shapes(values).items()}
    added = lambda n: n.endswith("norm.weight") and ".linear_attn." not in n  # noqa: E731
    if values["model_type"] == "gemma4_text":  # no factor of scores: large ones amplify rounding
        gains = ("q_norm.weight", "k_norm.weight")
        found = {n: np.float32(0.6) * a if n.endswith(gains) else a for n, a in found.items()}
    return {n: a - offset if added(n) else a for n, a in found.items()}


#: config.json's keys for a layer of experts as DeepSeek-V3 has them, and its tokens.
DEEPSEEK_V3 = {
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
}


def deepseek_v3_tensors() -> dict[str, np.ndarray]:
    """The input "x" and the weights of that layer, with the names of published files."""
    D, F, E = (DEEPSEEK_V3[key] for key in list(DEEPSEEK_V3)[:3])
    of = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    wide = {"gate_proj": (2 * F, D), "up_proj": (2 * F, D), "down_proj": (D, 2 * F)}
    found = _experts("", E, D, of) | {"gate.e_score_correction_bias": (E,), "x": (NUM_TOKENS, D)}
    found |= {f"shared_experts.{name}.weight": shape for name, shape in wide.items()}
    scale = {"x": 6.0, "gate.weight": 3.0}
    return {name: scale.get(name, 1.0) * tensor(name, shape) for name, shape in found.items()}


#: config.json's keys for a layer of experts as gpt-oss has them.
GPT_OSS = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}


def gpt_oss_tensors() -> dict[str, np.ndarray]:
    """The input "x", the weights of that layer, and "d_out", a gradient of its output.

    A part of gate and up is beyond the limit: tests/convert/test_gpt_oss.py.
    """
    D, F, E = (GPT_OSS[key] for key in list(GPT_OSS)[:3])
    found = {"x": (NUM_TOKENS, D), "d_out": (NUM_TOKENS, D)}
    found |= {"router.weight": (E, D), "router.bias": (E,)}
    found |= {"experts.gate_up_proj": (E, D, 2 * F), "experts.gate_up_proj_bias": (E, 2 * F)}
    found |= {"experts.down_proj": (E, F, D), "experts.down_proj_bias": (E, D)}
    scale = {"x": 6.0, "experts.gate_up_proj": 10.0}
    return {name: scale.get(name, 1.0) * tensor(name, shape) for name, shape in found.items()}


def mxfp4_tensors() -> dict[str, np.ndarray]:
    """A weight [2, 96, 8] in MXFP4, with every byte, and scales of many sizes."""
    rng = np.random.default_rng(2)
    blocks = np.concatenate([rng.permutation(256) for _ in range(3)]).astype(np.uint8)
    scales = rng.integers(127 - 30, 127 + 30, (2, 8, 3)).astype(np.uint8)
    return {"blocks": blocks.reshape(2, 8, 3, 16), "scales": scales}


def experts_of_gpt_oss(values: dict) -> list[str]:
    """The names of the tensors that are in MXFP4 in published files."""
    return [n for n in shapes(values) if n.endswith(("gate_up_proj", "experts.down_proj"))]


def as_mxfp4(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Replace a tensor [E, D, F] by random blocks and scales of its size, of numbers about 0.1."""
    E, D, F = arrays[name].shape
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    blocks = rng.integers(0, 256, (E, F, D // 32, 16)).astype(np.uint8)
    scales = rng.integers(121, 124, blocks.shape[:-1]).astype(np.uint8)
    others = {n: a for n, a in arrays.items() if n != name}
    return others | {f"{name}_blocks": blocks, f"{name}_scales": scales}


#: The model that adapters are put on, and PEFT's names for what they are.
ADAPTED = "qwen3"
ADAPTERS = {
    "r": 4,
    "lora_alpha": 12,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "use_rslora": True,
}


def adapter_tensors() -> dict[str, np.ndarray]:
    """Adapters of ADAPTED, by the names that PEFT gives them."""
    rank, found = ADAPTERS["r"], {}
    for name, shape in shapes(MODELS[ADAPTED]).items():
        if name.split(".")[-2] not in ADAPTERS["target_modules"]:
            continue
        rows, columns = shape
        module = f"base_model.model.{name.removesuffix('weight')}"
        for part, sides in {"lora_A": (rank, columns), "lora_B": (rows, rank)}.items():
            found[f"{module}{part}.weight"] = tensor(f"{module}{part}.weight", sides)
    return found


def tokens(values: dict) -> np.ndarray:
    """The text, int64 [1, NUM_TOKENS]."""
    return np.random.default_rng(1).integers(0, values["vocab_size"], (1, NUM_TOKENS))


def write_safetensors(file: Path, arrays: dict[str, np.ndarray], dtype: str = "F32") -> None:
    """A file of arrays, written plainly and apart from the code under test. Bytes are U8."""
    header, begin = {}, 0
    for name, a in arrays.items():
        code = "U8" if a.dtype == np.uint8 else dtype
        header[name] = {"dtype": code, "shape": a.shape, "data_offsets": [begin, begin + a.nbytes]}
        begin += a.nbytes
    text = json.dumps(header).encode()
    body = b"".join(a.tobytes() for a in arrays.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_folder(folder: Path, values: dict) -> Path:
    """A model as published: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    write_safetensors(folder / "model.safetensors", tensors(values))
    return folder
