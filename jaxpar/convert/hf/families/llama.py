"""Llama 2 and 3, and what others publish in its format."""

from jaxpar.convert.hf.families.shared import BIASES, OF_LLAMA, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Names

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA),
    fields=COMMON | BIASES | {"Glu.bias": "mlp_bias"},
    defaults={"attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-6},
    required=SILU,
)
