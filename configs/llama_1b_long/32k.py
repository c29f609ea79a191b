"""A 1B model on 32,768 tokens: python -m jaxpar.train llama_1b_long/32k

The second of three stages to a context of 128k (docs/long_context.md). It starts from the weights
of llama_1b_long/8k, with a larger base of the rotary embedding. Never run at full length.
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
    rope_theta=4_000_000.0,
    tie_embeddings=True,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(
            dir="runs/llama_1b_long_32k",
            init_from="runs/llama_1b_long_8k",
            init_changes="rope_theta",
        ),
        model=MODEL,
        data=DataConfig(seq_len=32768),
        train=TrainConfig(num_steps=2000, global_batch_size=16),
        parallel=ParallelConfig(data=-1, sequence=2, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=100),
    )
