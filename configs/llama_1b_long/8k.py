"""A 1B model on 8,192 tokens: python -m jaxpar.train llama_1b_long/8k

The first of three stages to a context of 128k (docs/long_context.md). Never run at full length.
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
    num_layers=16,
    d_model=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    d_ff=8192,
    vocab_size=128256,
    rope_theta=500_000.0,
    tie_embeddings=True,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/llama_1b_long_8k"),
        model=MODEL,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=20000, global_batch_size=64),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=500),
    )
