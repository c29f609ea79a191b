"""Llama 3.1 405B on 384 GPUs: python -m jaxpar.train llama3_405b

On 768 GPUs, add --train.global-batch-size 1536, which the number of microbatches requires.

Shape: Llama 3 (2407.21783), table 3. The 126 layers form 6 stages of 3 chunks of 7 layers.
"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config("llama3_3_70b"),
        **{
            "run.dir": "runs/llama3_405b",
            "model.d_model": 16_384,
            "model.num_layers": 126,
            "model.*.mixer.num_heads": 128,
            "model.*.feed_forward.d_ff": 53_248,
            "train.global_batch_size": 1152,
            "parallel.pipeline": 6,
            "parallel.num_microbatches": 48,
            "parallel.virtual_stages": 3,
            "parallel.zero": 1,
            "optimizer.learning_rate": 8e-5,
            "optimizer.warmup_steps": 8000,
        },
    )
