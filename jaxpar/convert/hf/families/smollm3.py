"""SmolLM3: every fourth layer has no rotary embedding."""

from jaxpar.convert.hf.families.shared import BIASES, OF_LLAMA, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Names

SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA),
    fields=COMMON | BIASES | {"Glu.bias": "mlp_bias"},
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2_000_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    required=SILU | {"use_sliding_window": False},
    nope=True,
)
