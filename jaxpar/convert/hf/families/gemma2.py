"""Gemma 2: caps of scores and logits, and a window in every second layer."""

from jaxpar.convert.hf.families.shared import ATTENTION, BIASES, MLP, NORMS_AROUND, TOP
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.names import Names

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names=Names(top=TOP, weights=NORMS_AROUND | ATTENTION | MLP),
    fields=COMMON
    | BIASES
    | {
        "Attention.scale_dim": "query_pre_attn_scalar",
        "Attention.softcap": "attn_logit_softcapping",
        "logits_softcap": "final_logit_softcapping",
    },
    instead={"Attention.scale_dim": "Attention.head_dim"},
    fixed={
        "Layer.norms": "around",
        "Norm.offset": True,
        "embed_scale": True,
        "Glu.activation": "gelu",
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
