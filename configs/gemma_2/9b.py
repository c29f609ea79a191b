"""Gemma 2 9B: python -m jaxpar.train gemma_2/9b

Shape: the published google/gemma-2-9b; Gemma 2 (2408.00118), table 1. Scores and logits are capped,
and every second layer has a window. --run.init-from takes the published weights (docs/convert.md).
"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config("gemma_2/2b"),
        **{
            "run.dir": "runs/gemma_2_9b",
            "model.d_model": 3584,
            "model.num_layers": 42,
            "model.*.mixer.num_heads": 16,
            "model.*.mixer.num_kv_heads": 8,
            "model.*.feed_forward.d_ff": 14_336,
            "parallel.remat": "attn_out",
        },
    )
