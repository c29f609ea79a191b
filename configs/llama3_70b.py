"""Llama 3 70B on 64 GPUs, or 8 times any other power of two: python -m jaxpar.train llama3_70b

Shape: Llama 3 (2407.21783), table 3. Tensor parallelism within a host, FSDP across hosts.
"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config("llama3_8b"),
        **{
            "run.dir": "runs/llama3_70b",
            "model.d_model": 8192,
            "model.num_layers": 80,
            "model.*.mixer.num_heads": 64,
            "model.*.feed_forward.d_ff": 28_672,
            "train.num_steps": 100_000,
            "train.global_batch_size": 512,
            "parallel.tensor": 8,
            "parallel.remat": "attn_out",
            "optimizer.learning_rate": 1.5e-4,
            "optimizer.warmup_steps": 2000,
        },
    )
