"""The text part of Gemma 4: layers with a window, and global ones with heads of their own."""

from jaxpar.components.attention import QkNorm
from jaxpar.convert.hf.families.shared import ATTENTION, MLP, NORMS_AROUND, TOP
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.names import Names

GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    names=Names(top=TOP, weights=NORMS_AROUND | ATTENTION | MLP | {"layer_scale": "layer_scalar"}),
    fields=COMMON | {"logits_softcap": "final_logit_softcapping"},
    fixed={
        "Attention.qk_norm": QkNorm(),
        "Attention.value_norm": True,
        "Attention.scale": 1.0,
        "Layer.norms": "around",
        "Layer.scaled": True,
        "embed_scale": True,
        "Glu.activation": "gelu",
    },
    defaults={
        "vocab_size": 262_144,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    },
    required={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "hidden_size_per_layer_input": 0,  # embeddings of each layer: E2B, E4B
        "num_kv_shared_layers": 0,  # layers without keys of their own: E2B, E4B
        "enable_moe_block": False,  # experts beside a dense feed-forward: 26B-A4B
    },
    global_heads=True,
)
