"""Gemma 2 2B: python -m jaxpar.train gemma_2/2b

Shape: the published google/gemma-2-2b; Gemma 2 (2408.00118), table 1. Scores and logits are capped,
and every second layer has a window. --run.init-from takes the published weights (docs/convert.md).
"""

import dataclasses

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Glu,
    Layer,
    Model,
    Norm,
    OptimizerConfig,
    ParallelConfig,
    Rope,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    local = Attention(
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        rope=Rope(theta=10_000.0),
        window=4096,
        scale_dim=256,
        softcap=50.0,
    )
    everywhere = dataclasses.replace(local, window=None)
    feed_forward = Glu(9216, activation="gelu")
    local_layer = Layer("layers", local, feed_forward, norms="around")
    wide = Layer("global_layers", everywhere, feed_forward, norms="around")
    model = Model(
        d_model=2304,
        vocab_size=256_000,
        layers=[local_layer, wide] * 13,
        tie_embeddings=True,
        norm=Norm(eps=1e-06, offset=True),
        embed_scale=True,
        logits_softcap=30.0,
    )
    return Config(
        run=RunConfig(dir="runs/gemma_2_2b"),
        model=model,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
