"""A 1B model on 131,072 tokens: python -m jaxpar.train llama_1b_long/128k

The last of three stages to a context of 128k (docs/long_context.md). It starts from the weights of
llama_1b_long/32k, with a larger base of the rotary embedding. Never run at full length.
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
    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=64, rope=Rope(theta=16_000_000.0))
    layer = Layer("layers", attention, Glu(8192))
    model = Model(
        d_model=2048,
        vocab_size=128_256,
        layers=[layer] * 16,
        tie_embeddings=True,
    )
    return Config(
        run=RunConfig(
            dir="runs/llama_1b_long_128k",
            init_from="runs/llama_1b_long_32k",
            init_changes=("mixer.rope.theta",),
        ),
        model=model,
        data=DataConfig(seq_len=131072),
        train=TrainConfig(num_steps=1000, global_batch_size=8),
        parallel=ParallelConfig(data=-1, sequence=8, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=100),
    )
