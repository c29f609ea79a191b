"""Gemma 3 (text): five of six layers have a window, and a RoPE of their own."""

from jaxpar.components.attention import QkNorm
from jaxpar.convert.hf.families.shared import ATTENTION, BIASES, MLP, NORMS_AROUND, TOP
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.names import Names

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=Names(top=TOP, weights=NORMS_AROUND | ATTENTION | MLP),
    fields=COMMON | BIASES | {"Attention.scale_dim": "query_pre_attn_scalar"},
    instead={"Attention.scale_dim": "Attention.head_dim"},
    fixed={
        "Attention.qk_norm": QkNorm(),
        "Layer.norms": "around",
        "Norm.offset": True,
        "embed_scale": True,
        "Glu.activation": "gelu",
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
    reads_interval=True,
)
