"""Mistral 7B."""

from jaxpar.convert.hf.families.shared import OF_LLAMA, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Names

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA),
    fields=COMMON,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    required=SILU,
    sliding=True,
)
