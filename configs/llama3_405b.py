"""Llama 3.1 405B on 384 GPUs: python -m jaxpar.train llama3_405b

On 768 GPUs, add --train.global-batch-size 1536, which the number of microbatches requires.

Shape: Llama 3 (2407.21783), table 3. The 126 layers form 6 stages of 3 chunks of 7 layers.
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
    num_layers=126,
    d_model=16384,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    d_ff=53248,
    vocab_size=128256,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(factor=8.0),
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/llama3_405b"),
        model=MODEL,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=1152),
        parallel=ParallelConfig(
            pipeline=6,
            data=-1,
            tensor=8,
            num_microbatches=48,
            virtual_stages=3,
            zero=1,
            remat="attn_out",
            layer_loop="unroll",
        ),
        optimizer=OptimizerConfig(learning_rate=8e-5, warmup_steps=8000),
    )
