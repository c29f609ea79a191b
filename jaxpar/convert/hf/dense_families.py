"""Tables of dense families whose blocks are not Llama's: fused matrices, factors, caps, GPT-3's.

And of Llama 4, whose experts are not like those of other families.

`families.py` has the others, and explains a table.
"""

from jaxpar.convert.hf.entries import (
    ATTENTION,
    GEMMA_NORMS,
    GPT2_LAYERS,
    GPT2_TOP,
    LLAMA4_EXPERTS,
    LLAMA4_MLP,
    MLP,
    MLP_BIAS,
    MLP_NORM,
    NEOX_LAYERS,
    NEOX_TOP,
    OUT_BIAS,
    PHI3_LAYERS,
    QKV_BIAS,
    STARCODER2_LAYERS,
    TOP,
    of_dense_layers,
)
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.keys.ropes import ORIGINAL

_SILU = {"hidden_act": "silu"}

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    entries=(*TOP, *PHI3_LAYERS),
    fields=COMMON,
    defaults={"rms_norm_eps": 1e-5, ORIGINAL: 4096, "sliding_window": None},
    required=_SILU
    | dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), False)
    | {"full_attn_mod": 1, "interpolate_factor": 1},
    sliding=True,
    ropes=("default", "longrope"),
    rope_fraction=1.0,
    heads_fill_model=True,
)
GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *MLP, *MLP_BIAS),
    fields=COMMON
    | {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    | {
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "attention_multiplier": "attention_multiplier",
        "logits_scaling": "logits_scaling",
    },
    given=("attention_multiplier",),
    defaults={
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    required=_SILU,
    heads_fill_model=True,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *GEMMA_NORMS, *MLP[1:]),
    fields=COMMON
    | {
        "query_scale_dim": "query_pre_attn_scalar",
        "attention_softcap": "attn_logit_softcapping",
        "logits_softcap": "final_logit_softcapping",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    same_as={"query_scale_dim": "head_dim"},
    fixed={
        "post_norms": True,
        "norm_offset": True,
        "embed_scale": True,
        "activation": "gelu",
    },
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    required={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    sliding=True,
    two_kinds=True,
)
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    entries=(*TOP, *ATTENTION, *MLP),
    fields=COMMON,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    required=_SILU,
    sliding=True,
    ropes=("yarn",),
    query_beta=True,
)

#: The GPT-3 block: LayerNorm, and a feed-forward without a gate.
_BLOCK = {"norm": "layer", "mlp_gate": False}

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    entries=(*GPT2_TOP, *GPT2_LAYERS),
    fields={
        "num_layers": "n_layer",
        "d_model": "n_embd",
        "num_heads": "n_head",
        "d_ff": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    },
    fixed=_BLOCK
    | {"activation": "gelu", "positions": "learned"}
    | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    required={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    rope=False,
    heads_alike=True,
    prefix="transformer.",
    heads_fill_model=True,
)
GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    entries=(*NEOX_TOP, *NEOX_LAYERS),
    fields={
        "num_layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "norm_eps": "layer_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
        "parallel_block": "use_parallel_residual",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    fixed=_BLOCK | {"activation": "gelu_exact", "mlp_bias": True},
    defaults={
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    required={"hidden_act": "gelu"},
    aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    rope_fraction=0.25,
    heads_alike=True,
    heads_fill_model=True,
)
STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *STARCODER2_LAYERS),
    fields=COMMON
    | {"norm_eps": "norm_epsilon"}
    | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), "use_bias"),
    fixed=_BLOCK | {"activation": "gelu"},
    defaults={
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    required={
        "hidden_act": "gelu_pytorch_tanh",
        "norm_type": "layer_norm",
        "mlp_type": "default",
    },
    sliding=True,
    heads_fill_model=True,
)
_OF_LLAMA4 = (*ATTENTION, *QKV_BIAS, *OUT_BIAS)
LLAMA4 = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    entries=(
        *(*TOP, *_OF_LLAMA4, *MLP_NORM, *LLAMA4_EXPERTS),
        *of_dense_layers((*_OF_LLAMA4, *LLAMA4_MLP)),
    ),
    fields=COMMON
    | {
        "moe_every": "interleave_moe_layer_step",
        "dense_d_ff": "intermediate_size_mlp",
        "qk_norm": "use_qk_norm",
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    fixed={
        "rope_layout": "interleaved",
        "router_score": "sigmoid",
        "router_scales_input": True,
        "normalize_experts": False,
        "num_shared_experts": 1,
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_bias": False,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 16384,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    same_as={"dense_d_ff": "d_ff"},
    required=_SILU,
    nope=True,
    chunked=True,
)
