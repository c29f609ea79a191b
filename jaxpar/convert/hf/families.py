"""The published families: one table for each, used for both import and export.

A `Family` maps the fields of jaxpar to keys of config.json (used by `config.py`), and parameters to
tensors (`tensor_layout.py` explains an Entry). To add a family, add a table. To support a new
feature, first add its field and its parameter to the model.
"""

from dataclasses import dataclass, field
from typing import Any

from jaxpar.convert.hf.tensor_layout import Entry

_LAYER = "model.layers.{L}."
_ATTENTION = _LAYER + "self_attn."

TOP = (
    Entry("embed", "model.embed_tokens.weight", "VD", "V D"),
    Entry("final_norm", "model.norm.weight", "D", "D"),
    Entry("head", "lm_head.weight", "DV", "V D"),
)
ATTENTION = (
    Entry("layers/attn_norm", _LAYER + "input_layernorm.weight", "LD", "D"),
    Entry("layers/wq", _ATTENTION + "q_proj.weight", "LDHK", "HK D"),
    Entry("layers/wk", _ATTENTION + "k_proj.weight", "LDGK", "GK D"),
    Entry("layers/wv", _ATTENTION + "v_proj.weight", "LDGK", "GK D"),
    Entry("layers/wo", _ATTENTION + "o_proj.weight", "LHKD", "D HK"),
)
QKV_BIAS = (
    Entry("layers/bq", _ATTENTION + "q_proj.bias", "LHK", "HK"),
    Entry("layers/bk", _ATTENTION + "k_proj.bias", "LGK", "GK"),
    Entry("layers/bv", _ATTENTION + "v_proj.bias", "LGK", "GK"),
)
OUT_BIAS = (Entry("layers/bo", _ATTENTION + "o_proj.bias", "LD", "D"),)
QK_NORM = (
    Entry("layers/q_norm", _ATTENTION + "q_norm.weight", "LK", "K"),
    Entry("layers/k_norm", _ATTENTION + "k_norm.weight", "LK", "K"),
)
QK_NORM_OVER_ALL = (
    Entry("layers/q_norm", _ATTENTION + "q_norm.weight", "LHK", "HK"),
    Entry("layers/k_norm", _ATTENTION + "k_norm.weight", "LGK", "GK"),
)
MLP = (
    Entry("layers/mlp_norm", _LAYER + "post_attention_layernorm.weight", "LD", "D"),
    Entry("layers/w_gate", _LAYER + "mlp.gate_proj.weight", "LDF", "F D"),
    Entry("layers/w_up", _LAYER + "mlp.up_proj.weight", "LDF", "F D"),
    Entry("layers/w_down", _LAYER + "mlp.down_proj.weight", "LFD", "D F"),
)
MLP_BIAS = (
    Entry("layers/b_gate", _LAYER + "mlp.gate_proj.bias", "LF", "F"),
    Entry("layers/b_up", _LAYER + "mlp.up_proj.bias", "LF", "F"),
    Entry("layers/b_down", _LAYER + "mlp.down_proj.bias", "LD", "D"),
)
MLP_NORM = MLP[:1]
MIXTRAL_EXPERTS = (
    Entry("layers/router", _LAYER + "block_sparse_moe.gate.weight", "LDE", "E D"),
    Entry("layers/w_gate", _LAYER + "block_sparse_moe.experts.{E}.w1.weight", "LEDF", "F D"),
    Entry("layers/w_up", _LAYER + "block_sparse_moe.experts.{E}.w3.weight", "LEDF", "F D"),
    Entry("layers/w_down", _LAYER + "block_sparse_moe.experts.{E}.w2.weight", "LEFD", "D F"),
)
EXPERTS = (
    Entry("layers/router", _LAYER + "mlp.gate.weight", "LDE", "E D"),
    Entry("layers/w_gate", _LAYER + "mlp.experts.{E}.gate_proj.weight", "LEDF", "F D"),
    Entry("layers/w_up", _LAYER + "mlp.experts.{E}.up_proj.weight", "LEDF", "F D"),
    Entry("layers/w_down", _LAYER + "mlp.experts.{E}.down_proj.weight", "LEFD", "D F"),
)
#: What the layers of DeepSeek-V3 and its relatives have beside EXPERTS.
SHARED_EXPERTS = (
    Entry("layers/router_bias", _LAYER + "mlp.gate.e_score_correction_bias", "LE", "E"),
    Entry("layers/w_shared_gate", _LAYER + "mlp.shared_experts.gate_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_up", _LAYER + "mlp.shared_experts.up_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_down", _LAYER + "mlp.shared_experts.down_proj.weight", "LSD", "D S"),
)
GEMMA_NORMS = (
    Entry("layers/attn_post_norm", _LAYER + "post_attention_layernorm.weight", "LD", "D"),
    Entry("layers/mlp_norm", _LAYER + "pre_feedforward_layernorm.weight", "LD", "D"),
    Entry("layers/mlp_post_norm", _LAYER + "post_feedforward_layernorm.weight", "LD", "D"),
)


def of_dense_layers(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the entries of `model.dense_layers`, from those of layers that are all dense."""

    def letters(text: str) -> str:
        return text.replace("L", "N").replace("F", "W")

    return tuple(
        Entry(f"dense_{a.path}", a.name.replace("{L}", "{N}"), letters(a.ours), letters(a.theirs))
        for a in entries
    )


#: Fields whose keys are the same in every family.
COMMON = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The format of a published family of models."""

    model_type: str
    """`model_type` of its config.json."""
    architecture: str
    """The class in `architectures`."""
    entries: tuple[Entry, ...]
    """All parameters that a model of the family may have."""
    fields: dict[str, str]
    """Keys of config.json, by field of ModelConfig."""
    same_as: dict[str, str] = field(default_factory=dict)
    """Fields where None stands for the value of another field, which config.json contains."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields with the same value in all models of the family."""
    at_least: dict[str, int] = field(default_factory=dict)
    """Fields with a minimum in all models of the family."""
    defaults: dict[str, Any]
    """Defaults of missing keys in config.json."""
    required: dict[str, Any] = field(default_factory=dict)
    """Keys with the only supported value; with another, the model would compute something else."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Alternative names of keys in some versions of `transformers`: {other: key}."""
    sliding: bool = False
    """Whether layers may have a sliding window."""
    two_kinds: bool = False
    """Whether layers with a window may alternate with global ones that have another RoPE base."""
    heads_fill_model: bool = False
    """Whether num_heads * head_dim must be d_model."""


_SILU = {"hidden_act": "silu"}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *MLP, *MLP_BIAS),
    fields=COMMON
    | {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults={"attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-6},
    required=_SILU,
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    entries=(*TOP, *ATTENTION, *MLP),
    fields=COMMON,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    required=_SILU,
    sliding=True,
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *MLP),
    fields=COMMON,
    fixed={"qkv_bias": True},
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    required=_SILU,
    sliding=True,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *QK_NORM, *MLP),
    fields=COMMON | {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    fixed={"qk_norm": True},
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    required=_SILU,
    sliding=True,
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    entries=(*TOP, *ATTENTION, *MLP_NORM, *MIXTRAL_EXPERTS),
    fields=COMMON
    | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    fixed={"normalize_experts": True},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    required=_SILU,
    sliding=True,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *QK_NORM, *MLP_NORM, *EXPERTS),
    fields=COMMON
    | {
        "d_ff": "moe_intermediate_size",
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "normalize_experts": "norm_topk_prob",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    fixed={"qk_norm": True},
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    # Every layer has experts, and no layer has a sliding window.
    required=_SILU | {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    aliases={"num_local_experts": "num_experts"},
)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *QK_NORM_OVER_ALL, *MLP_NORM, *EXPERTS),
    fields=COMMON
    | {
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "normalize_experts": "norm_topk_prob",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    fixed={"qk_norm": True, "qk_norm_over": "all"},
    defaults={
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    required=_SILU | {"clip_qkv": None},
    heads_fill_model=True,
)
_OF_DOTS1 = (*ATTENTION, *QKV_BIAS, *OUT_BIAS, *QK_NORM)
DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    entries=(
        *(*TOP, *_OF_DOTS1, *MLP_NORM, *EXPERTS, *SHARED_EXPERTS),
        *of_dense_layers((*_OF_DOTS1, *MLP)),
    ),
    fields=COMMON
    | {
        "d_ff": "moe_intermediate_size",
        "dense_d_ff": "intermediate_size",
        "dense_layers": "first_k_dense_replace",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "experts_per_token": "num_experts_per_tok",
        "normalize_experts": "norm_topk_prob",
        "router_groups": "n_group",
        "router_groups_per_token": "topk_group",
        "router_scale": "routed_scaling_factor",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    same_as={"dense_d_ff": "d_ff"},
    fixed={"qk_norm": True, "router_score": "sigmoid", "router_bias": True},
    at_least={"num_shared_experts": 1},
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    required=_SILU,
    aliases={"num_local_experts": "n_routed_experts"},
    sliding=True,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *QK_NORM, *GEMMA_NORMS, *MLP[1:]),
    fields=COMMON
    | {
        "query_scale_dim": "query_pre_attn_scalar",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    same_as={"query_scale_dim": "head_dim"},
    fixed={
        "qk_norm": True,
        "post_norms": True,
        "norm_offset": True,
        "embed_scale": True,
        "activation": "gelu",
        "rope_scaling": None,
    },
    defaults={
        "vocab_size": 262_208,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    required={
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    sliding=True,
    two_kinds=True,
)

#: The first family in this order that can express a model is its default.
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, OLMOE, DOTS1, GEMMA3)
