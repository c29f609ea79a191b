"""Gemma 3 270M: python -m jaxpar.train gemma_3/270m

Shape: the published google/gemma-3-270m; Gemma 3 (2503.19786), section 2. Five of six layers have a
window. --run.init-from takes the published weights (docs/convert.md).
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
    QkNorm,
    Rope,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    local = Attention(
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        rope=Rope(theta=10_000.0),
        window=512,
        qk_norm=QkNorm(),
        scale_dim=256,
    )
    everywhere = dataclasses.replace(local, rope=Rope(theta=1_000_000.0), window=None)
    feed_forward = Glu(2048, activation="gelu")
    local_layer = Layer("layers", local, feed_forward, norms="around")
    wide = Layer("global_layers", everywhere, feed_forward, norms="around")
    model = Model(
        d_model=640,
        vocab_size=262_144,
        layers=([local_layer] * 5 + [wide]) * 3,
        tie_embeddings=True,
        norm=Norm(eps=1e-06, offset=True),
        embed_scale=True,
    )
    return Config(
        run=RunConfig(dir="runs/gemma_3_270m"),
        model=model,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
