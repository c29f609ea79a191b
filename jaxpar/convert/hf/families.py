"""The published families: one table for each, used for both import and export.

A `Family` maps the fields of jaxpar to keys of config.json (used by `config.py`), and parameters to
tensors (`tensor_layout.py` explains an Entry). To add a family, add a table, here or in
`dense_families.py`. To support a new feature, first add its field and its parameter to the model.
"""

from jaxpar.convert.hf.deepseek_families import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_K2,
    OF_SIGMOID_ROUTERS,
)
from jaxpar.convert.hf.dense_families import (
    GEMMA2,
    GPT2,
    GPT_NEOX,
    GRANITE,
    LLAMA4,
    MINISTRAL3,
    PHI3,
    STARCODER2,
)
from jaxpar.convert.hf.entries import (
    ATTENTION,
    EXPERTS,
    GEMMA_NORMS,
    GPT_OSS_EXPERTS,
    MIXTRAL_EXPERTS,
    MLP,
    MLP_BIAS,
    MLP_NORM,
    OUT_BIAS,
    QK_NORM,
    QK_NORM_OVER_ALL,
    QKV_BIAS,
    SHARED_EXPERTS,
    SINKS,
    TOP,
    of_dense_layers,
    of_modules,
)
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.gemma4 import GEMMA4
from jaxpar.convert.hf.hybrid_families import (
    KIMI_LINEAR,
    NEMOTRON_H,
    NEMOTRON_H_EXPERTS,
    QWEN3_5,
    QWEN3_NEXT,
)
from jaxpar.convert.hf.olmo_families import OLMO2, OLMO3, OLMO_HYBRID

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
    required=_SILU | {"use_mrope": False},
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
    | OF_SIGMOID_ROUTERS
    | {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
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
_OF_GLM4 = (*ATTENTION, *QKV_BIAS, *QK_NORM)
_MOE_OF_GLM4 = (*_OF_GLM4, *MLP_NORM, *EXPERTS, *SHARED_EXPERTS)
GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    entries=(
        *(*TOP, *_MOE_OF_GLM4, *of_dense_layers((*_OF_GLM4, *MLP))),
        *of_modules(_MOE_OF_GLM4),
    ),
    fields=COMMON
    | OF_SIGMOID_ROUTERS
    | {"qk_norm": "use_qk_norm", "qkv_bias": "attention_bias"}
    | {"mtp_depth": "num_nextn_predict_layers"},
    same_as={"dense_d_ff": "d_ff"},
    fixed={"router_score": "sigmoid", "router_bias": True},
    at_least={"num_shared_experts": 1},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    },
    required=_SILU,
    aliases={"num_local_experts": "n_routed_experts"},
    rope_fraction=0.5,
    copies=DEEPSEEK_V3.copies,
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
    two_ropes="rope_local_base_freq",
)
SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *MLP, *MLP_BIAS),
    fields=COMMON
    | {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2_000_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    required=_SILU | {"use_sliding_window": False},
    nope=True,
)
HELIUM = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *MLP, *MLP_BIAS),
    fields=COMMON | {"qkv_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    fixed={"rope_layout": "interleaved"},
    defaults={
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100_000.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    required=_SILU,
    heads_fill_model=True,
)

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *SINKS, *MLP_NORM, *GPT_OSS_EXPERTS),
    fields=COMMON
    | {
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "swiglu_limit": "swiglu_limit",
        "swiglu_alpha": "swiglu_alpha",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    fixed={
        "attention_sinks": True,
        "router_linear_bias": True,
        "expert_bias": True,
        "normalize_experts": True,
        "activation": "clamped_swiglu",
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    required=_SILU,
    aliases={"num_experts": "num_local_experts"},
    sliding=True,
    two_kinds=True,
    mxfp4=True,
)

#: The first family in this order that can express a model is its default.
FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, OLMOE, DOTS1, GLM4_MOE, GEMMA3),
    *(DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, QWEN3_NEXT, QWEN3_5, NEMOTRON_H, NEMOTRON_H_EXPERTS),
    KIMI_LINEAR,
    *(OLMO2, OLMO3, OLMO_HYBRID, SMOLLM3, HELIUM, GPT_OSS, PHI3, GRANITE, GEMMA2),
    *(MINISTRAL3, LLAMA4, GPT2, GPT_NEOX, STARCODER2, GEMMA4),
)
