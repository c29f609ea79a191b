"""Qwen3."""

from jaxpar.components.attention import QkNorm
from jaxpar.convert.hf.families.shared import BIASES, OF_LLAMA, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Names

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA),
    fields=COMMON | BIASES,
    fixed={"Attention.qk_norm": QkNorm()},
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    required=SILU,
    sliding=True,
)
