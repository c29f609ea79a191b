"""Helium: neighboring dims are rotated together."""

from jaxpar.convert.hf.families.shared import OF_LLAMA, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Names

HELIUM = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA),
    fields=COMMON | {"Attention.bias": "attention_bias", "Glu.bias": "mlp_bias"},
    defaults={
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100_000.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    required=SILU,
    rope_layout="interleaved",
    heads_fill_model=True,
    width_is_fixed=True,
)
