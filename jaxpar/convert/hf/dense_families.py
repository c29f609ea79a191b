"""Tables of dense families whose blocks are not Llama's: fused matrices, factors, caps.

`families.py` has the others, and explains a table.
"""

from jaxpar.convert.hf.entries import (
    ATTENTION,
    GEMMA_NORMS,
    MLP,
    MLP_BIAS,
    OUT_BIAS,
    PHI3_LAYERS,
    QKV_BIAS,
    TOP,
)
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.rope_keys import ORIGINAL

_SILU = {"hidden_act": "silu"}

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    entries=(*TOP, *PHI3_LAYERS),
    fields=COMMON,
    defaults={"rms_norm_eps": 1e-5, ORIGINAL: 4096, "sliding_window": None},
    required=_SILU,
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
