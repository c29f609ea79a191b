"""OLMo 3: OLMo 2 with a window in three of four layers, which have a RoPE of their own."""

import dataclasses

from jaxpar.convert.hf.families.olmo2 import OLMO2

OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    sliding=True,
    two_kinds=True,
    two_ropes="rope_theta",
)
