"""Phi 4 (14B), for several GPUs: python -m jaxpar.train phi_4

Shape: the published microsoft/phi-4; Phi-4 (2412.08905), section 3. --run.init-from takes the
published weights (docs/convert.md).
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Glu,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    Rope,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(num_heads=40, num_kv_heads=10, head_dim=128, rope=Rope(theta=250_000.0))
    layer = Layer("layers", attention, Glu(17_920))
    model = Model(
        d_model=5120,
        vocab_size=100_352,
        layers=[layer] * 40,
    )
    return Config(
        run=RunConfig(dir="runs/phi_4"),
        model=model,
        data=DataConfig(seq_len=4096),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
