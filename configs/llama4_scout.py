"""Llama 4 Scout 17B-16E (text): python -m jaxpar.train llama4_scout

Three of four layers attend within chunks of 8192 tokens; every fourth attends to all, without a
rotary embedding (docs/architectures.md#chunks). A token uses one of 16 experts, and a shared one.
Pre-training 108B parameters takes 1.7 TB of weights, gradients and moments: at least sixteen H200.
"""

import dataclasses

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Experts,
    Glu,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    QkNorm,
    QueryGrowth,
    Rope,
    Router,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    local = Attention(
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        rope=Rope(layout="interleaved"),
        chunk=8192,
        qk_norm=QkNorm(gain=False),
    )
    everywhere = dataclasses.replace(local, rope=None, chunk=None, growth=QueryGrowth(beta=0.1))
    experts = Experts(
        expert=Glu(8192),
        num_experts=16,
        experts_per_token=1,
        router=Router(score="sigmoid", normalize=False, scales_input=True),
        num_shared_experts=1,
    )
    local_layer = Layer("layers", local, experts)
    wide = Layer("global_layers", everywhere, experts)
    model = Model(
        d_model=5120,
        vocab_size=202_048,
        layers=([local_layer] * 3 + [wide]) * 12,
    )
    return Config(
        run=RunConfig(dir="runs/llama4_scout"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=16384),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-3),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
