"""Llama 3 70B on 64 GPUs, or 8 times any other power of two: python -m jaxpar.train llama3_70b

Shape: Llama 3 (2407.21783), table 3. Tensor parallelism within a host, FSDP across hosts.
"""

from jaxpar.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)

MODEL = ModelConfig(
    num_layers=80,
    d_model=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    d_ff=28672,
    vocab_size=128256,
    rope_theta=500_000.0,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/llama3_70b"),
        model=MODEL,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=512),
        parallel=ParallelConfig(data=-1, tensor=8, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=2000),
    )
