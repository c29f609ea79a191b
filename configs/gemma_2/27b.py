"""Gemma 2 27B: python -m jaxpar.train gemma_2/27b

Shape: the published google/gemma-2-27b; Gemma 2 (2408.00118), table 1. Scores and logits are
capped, and every second layer has a window. --run.init-from takes the published weights
(docs/convert.md).
"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config("gemma_2/2b"),
        **{
            "run.dir": "runs/gemma_2_27b",
            "model.d_model": 4608,
            "model.num_layers": 46,
            "model.*.mixer.num_heads": 32,
            "model.*.mixer.num_kv_heads": 16,
            "model.*.mixer.head_dim": 128,
            "model.*.mixer.scale_dim": 144,
            "model.*.feed_forward.d_ff": 36_864,
            "parallel.remat": "attn_out",
        },
    )
