"""The text part of Gemma 4: layers with a window, and global ones with heads of their own."""

from jaxpar.convert.hf.entries import (
    ATTENTION,
    GEMMA_NORMS,
    LAYER,
    MLP,
    QK_NORM,
    TOP,
    of_global_layers,
)
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.tensor_layout import Entry

_LAYER = (
    *(*ATTENTION, *QK_NORM, *GEMMA_NORMS, *MLP[1:]),
    Entry("layers/layer_scale", LAYER + "layer_scalar", "L", "1"),
)
GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    entries=(*TOP, *_LAYER, *of_global_layers(_LAYER)),
    fields=COMMON | {"logits_softcap": "final_logit_softcapping"},
    fixed={
        "qk_norm": True,
        "value_norm": True,
        "post_norms": True,
        "layer_scale": True,
        "embed_scale": True,
        "activation": "gelu",
        "attention_multiplier": 1.0,
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
