"""Gemma 4 31B (its text part): python -m jaxpar.train gemma_4/31b

Shape: the text part of the published google/gemma-4-31B. Five of six layers have a window; the
others are global, with heads of their own, whose values are the keys. --run.init-from takes weights
of the class Gemma4ForCausalLM (docs/convert.md).
"""

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
    RopeScaling,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    local = Attention(
        num_heads=32,
        num_kv_heads=16,
        head_dim=256,
        rope=Rope(theta=10_000.0),
        window=1024,
        qk_norm=QkNorm(),
        value_norm=True,
        scale=1.0,
    )
    everywhere = Attention(
        num_heads=32,
        num_kv_heads=4,
        head_dim=512,
        rope=Rope(
            theta=1_000_000.0, scaling=RopeScaling(kind="proportional", factor=1.0, turning=0.25)
        ),
        qk_norm=QkNorm(),
        value_norm=True,
        keys_as_values=True,
        scale=1.0,
    )
    feed_forward = Glu(21_504, activation="gelu")
    local_layer = Layer("layers", local, feed_forward, norms="around", scaled=True)
    wide = Layer("global_layers", everywhere, feed_forward, norms="around", scaled=True)
    model = Model(
        d_model=5376,
        vocab_size=262_144,
        layers=([local_layer] * 5 + [wide]) * 10,
        tie_embeddings=True,
        norm=Norm(eps=1e-06),
        embed_scale=True,
        logits_softcap=30.0,
    )
    return Config(
        run=RunConfig(dir="runs/gemma_4_31b"),
        model=model,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
