"""Gemma 3 27B (its text part): python -m jaxpar.train gemma_3/27b

Shape: the text part of the published google/gemma-3-27b-pt; Gemma 3 (2503.19786), section 2. Five
of six layers have a window. --run.init-from takes weights of the class Gemma3ForCausalLM
(docs/convert.md).
"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    base = load_config("gemma_3/4b")
    period = base.model.layers[:6]
    return replace(
        base,
        **{
            "run.dir": "runs/gemma_3_27b",
            "model.d_model": 5376,
            "model.layers": period * 10 + period[:2],
            "model.*.mixer.num_heads": 32,
            "model.*.mixer.num_kv_heads": 16,
            "model.*.mixer.head_dim": 128,
            "model.*.mixer.scale_dim": 168,
            "model.*.feed_forward.d_ff": 21_504,
        },
    )
