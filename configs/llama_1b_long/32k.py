"""A 1B model on 32,768 tokens: python -m jaxpar.train llama_1b_long/32k

The second of three stages to a context of 128k (docs/architectures.md). It starts from the weights
of llama_1b_long/8k, with a larger base of the rotary embedding. Never run at full length.
"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config("llama_1b_long/8k"),
        **{
            "run.dir": "runs/llama_1b_long_32k",
            "run.init_from": "runs/llama_1b_long_8k",
            "run.init_changes": ("mixer.rope.theta",),
            "model.*.mixer.rope.theta": 4_000_000.0,
            "data.seq_len": 32_768,
            "train.num_steps": 2000,
            "train.global_batch_size": 16,
            "parallel.sequence": 2,
            "parallel.remat": "attn_out",
            "optimizer.learning_rate": 5e-5,
            "optimizer.warmup_steps": 100,
        },
    )
