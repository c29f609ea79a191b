"""A 1B model on 131,072 tokens: python -m jaxpar.train llama_1b_long/128k

The last of three stages to a context of 128k (docs/architectures.md). It starts from the weights of
llama_1b_long/32k, with a larger base of the rotary embedding. Never run at full length.
"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config("llama_1b_long/32k"),
        **{
            "run.dir": "runs/llama_1b_long_128k",
            "run.init_from": "runs/llama_1b_long_32k",
            "model.*.mixer.rope.theta": 16_000_000.0,
            "data.seq_len": 131_072,
            "train.num_steps": 1000,
            "train.global_batch_size": 8,
            "parallel.sequence": 8,
        },
    )
