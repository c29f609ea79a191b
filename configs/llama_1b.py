"""Llama 3.2 1B on one GPU: python -m jaxpar.train llama_1b

Shape: the published Llama 3.2 1B, with tied embeddings and RoPE scaling. The 1.5B shape of the
benchmarks is this config with --model.tie-embeddings False.
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


def get_config() -> Config:
    attention = Attention(
        num_heads=32, num_kv_heads=8, head_dim=64, rope=Rope(scaling=RopeScaling(factor=32.0))
    )
    layer = Layer("layers", attention, Glu(8192))
    model = Model(
        d_model=2048,
        vocab_size=128_256,
        layers=[layer] * 16,
        tie_embeddings=True,
    )
    return Config(
        run=RunConfig(dir="runs/llama_1b"),
        model=model,
        data=DataConfig(seq_len=4096),
        train=TrainConfig(num_steps=10_000, global_batch_size=8),
        parallel=ParallelConfig(data=-1, remat="dots", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=500),
    )
