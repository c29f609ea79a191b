"""gpt-oss-120b, 128 experts of which a token uses 4: python -m jaxpar.train gpt_oss_120b

Attention with sinks, with a window of 128 tokens in every second layer. --run.init-from takes the
published weights, in MXFP4 (docs/convert.md). Pre-training 116.8B parameters takes 1,869 GB of
weights, gradients and moments: at least 16 H200, with --parallel.auto all.
"""

import dataclasses

from jaxpar.config import (
    Attention,
    ClampedSwiglu,
    Config,
    DataConfig,
    Experts,
    Glu,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    Rope,
    RopeScaling,
    Router,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    local = Attention(
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rope=Rope(
            theta=150_000.0,
            scaling=RopeScaling(
                kind="yarn", factor=32.0, original_max_position=4096, truncate=False
            ),
        ),
        window=128,
        bias=True,
        out_bias=True,
        sinks=True,
    )
    everywhere = dataclasses.replace(local, window=None)
    experts = Experts(
        expert=Glu(2880, activation=ClampedSwiglu(), bias=True),
        num_experts=128,
        experts_per_token=4,
        router=Router(linear_bias=True),
    )
    local_layer = Layer("layers", local, experts)
    wide = Layer("global_layers", everywhere, experts)
    model = Model(
        d_model=2880,
        vocab_size=201_088,
        layers=[local_layer, wide] * 18,
    )
    return Config(
        run=RunConfig(dir="runs/gpt_oss_120b"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-3),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
