"""Phi 4 mini (3.8B), for one GPU or several: python -m jaxpar.train phi_4_mini

Shape: the published microsoft/Phi-4-mini-instruct, with RoPE on three quarters of each head and
LongRoPE beyond 4,096 tokens. --run.init-from takes the published weights (docs/convert.md).
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
    RopeScaling,
    RunConfig,
    TrainConfig,
)

# fmt: off
#: Divisors of the frequencies for sequences of more than 4,096 tokens.
LONG_FACTORS = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)
# fmt: on


def get_config() -> Config:
    attention = Attention(
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        rope=Rope(
            theta=10_000.0,
            scaling=RopeScaling(
                kind="longrope",
                factor=32.0,
                original_max_position=4096,
                short_factors=(1.0,) * 48,
                long_factors=LONG_FACTORS,
            ),
            fraction=0.75,
        ),
    )
    layer = Layer("layers", attention, Glu(8192))
    model = Model(
        d_model=3072,
        vocab_size=200_064,
        layers=[layer] * 32,
        tie_embeddings=True,
    )
    return Config(
        run=RunConfig(dir="runs/phi_4_mini"),
        model=model,
        data=DataConfig(seq_len=4096),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
