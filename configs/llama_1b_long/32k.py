"""A 1B model on 32,768 tokens: python -m jaxpar.train llama_1b_long/32k

The second of three stages to a context of 128k (docs/long_context.md). It starts from the weights
of llama_1b_long/8k, with a larger base of the rotary embedding. Never run at full length.
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
    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=64, rope=Rope(theta=4_000_000.0))
    layer = Layer("layers", attention, Glu(8192))
    model = Model(
        d_model=2048,
        vocab_size=128_256,
        layers=[layer] * 16,
        tie_embeddings=True,
    )
    return Config(
        run=RunConfig(
            dir="runs/llama_1b_long_32k",
            init_from="runs/llama_1b_long_8k",
            init_changes=("mixer.rope.theta",),
        ),
        model=model,
        data=DataConfig(seq_len=32768),
        train=TrainConfig(num_steps=2000, global_batch_size=16),
        parallel=ParallelConfig(data=-1, sequence=2, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=100),
    )
