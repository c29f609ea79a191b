"""Llama 3.2 1B on one GPU: python -m jaxpar.train llama_1b

Shape: the published Llama 3.2 1B, with tied embeddings and RoPE scaling. The 1.5B shape of the
benchmarks is this config with --model.tie-embeddings False.
"""

from jaxpar.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RopeScaling,
    RunConfig,
    TrainConfig,
)

MODEL = ModelConfig(
    num_layers=16,
    d_model=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    d_ff=8192,
    vocab_size=128256,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(factor=32.0),
    tie_embeddings=True,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/llama_1b"),
        model=MODEL,
        data=DataConfig(seq_len=4096),
        train=TrainConfig(num_steps=10_000, global_batch_size=8),
        parallel=ParallelConfig(data=-1, remat="dots", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=500),
    )
