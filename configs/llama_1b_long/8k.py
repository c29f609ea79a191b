"""A 1B model on 8,192 tokens: python -m jaxpar.train llama_1b_long/8k

The first of three stages to a context of 128k (docs/architectures.md). Never run at full length.
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
    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=64)
    layer = Layer("layers", attention, Glu(8192))
    model = Model(
        d_model=2048,
        vocab_size=128_256,
        layers=[layer] * 16,
        tie_embeddings=True,
    )
    return Config(
        run=RunConfig(dir="runs/llama_1b_long_8k"),
        model=model,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=20000, global_batch_size=64),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=500),
    )
