"""Llama 3.1 405B on 384 GPUs: python -m jaxpar.train llama3_405b

On 768 GPUs, add --train.global-batch-size 1536, which the number of microbatches requires.

Shape: Llama 3 (2407.21783), table 3. The 126 layers form 6 stages of 3 chunks of 7 layers.
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
        num_heads=128, num_kv_heads=8, head_dim=128, rope=Rope(scaling=RopeScaling())
    )
    layer = Layer("layers", attention, Glu(53_248))
    model = Model(
        d_model=16_384,
        vocab_size=128_256,
        layers=[layer] * 126,
    )
    return Config(
        run=RunConfig(dir="runs/llama3_405b"),
        model=model,
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
