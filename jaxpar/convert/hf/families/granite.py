"""Granite: factors of embeddings, branches, scores and logits."""

from jaxpar.convert.hf.families.shared import BIASES, OF_LLAMA, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Names

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA),
    fields=COMMON
    | BIASES
    | {
        "Glu.bias": "mlp_bias",
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "Attention.scale": "attention_multiplier",
        "logits_scaling": "logits_scaling",
    },
    given=("Attention.scale",),
    defaults={
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    required=SILU,
    heads_fill_model=True,
)
