"""Llama 3 8B on eight GPUs: python -m jaxpar.train llama3_8b

Shape: Llama 3 (2407.21783), table 3. Peak learning rate as published for 8B.
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
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=128)
    layer = Layer("layers", attention, Glu(14_336))
    model = Model(
        d_model=4096,
        vocab_size=128_256,
        layers=[layer] * 32,
    )
    return Config(
        run=RunConfig(dir="runs/llama3_8b"),
        model=model,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=10_000, global_batch_size=16),
        parallel=ParallelConfig(data=-1, zero=3, remat="dots", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=500),
    )
