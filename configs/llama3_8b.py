"""Llama 3 8B on eight GPUs: python -m jaxpar.train llama3_8b

Shape: Llama 3 (2407.21783), table 3. Peak learning rate as published for 8B.
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
    num_layers=32,
    d_model=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    d_ff=14336,
    vocab_size=128256,
    rope_theta=500_000.0,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/llama3_8b"),
        model=MODEL,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=10_000, global_batch_size=16),
        parallel=ParallelConfig(data=-1, zero=3, remat="dots", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=500),
    )
