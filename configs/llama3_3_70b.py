"""Llama 3.3 70B on 64 GPUs, or 8 times any other power of two: python -m jaxpar.train llama3_3_70b

Shape: the published Llama 3.3 70B (also Llama 3.1 70B), which is Llama 3 70B with scaled RoPE.
--run.init-from takes the published weights (docs/convert.md).
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
    num_layers=80,
    d_model=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    d_ff=28672,
    vocab_size=128256,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(
        factor=8.0,
        original_max_position=8192,
    ),
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/llama3_3_70b"),
        model=MODEL,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=512),
        parallel=ParallelConfig(data=-1, tensor=8, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=2000),
    )
