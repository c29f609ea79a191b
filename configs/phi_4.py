"""Phi 4 (14B), for several GPUs: python -m jaxpar.train phi_4

Shape: the published microsoft/phi-4; Phi-4 (2412.08905), section 3. --run.init-from takes the
published weights (docs/convert.md).
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
    num_layers=40,
    d_model=5120,
    num_heads=40,
    num_kv_heads=10,
    head_dim=128,
    d_ff=17920,
    vocab_size=100352,
    rope_theta=250_000.0,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/phi_4"),
        model=MODEL,
        data=DataConfig(seq_len=4096),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
