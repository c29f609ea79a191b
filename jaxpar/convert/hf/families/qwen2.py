"""Qwen2 and Qwen2.5."""

from jaxpar.convert.hf.families.shared import OF_LLAMA, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Names

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA),
    fields=COMMON,
    fixed={"Attention.bias": True},
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    required=SILU | {"use_mrope": False},
    sliding=True,
)
