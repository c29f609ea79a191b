"""Gemma 4 31B (its text part): python -m jaxpar.train gemma_4/31b

Shape: the text part of the published google/gemma-4-31B. Five of six layers have a window; the
others are global, with heads of their own, whose values are the keys. --run.init-from takes weights
of the class Gemma4ForCausalLM (docs/convert.md).
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
    num_layers=60,
    layer_pattern="*****A",
    d_model=5376,
    num_heads=32,
    num_kv_heads=16,
    head_dim=256,
    global_head_dim=512,
    global_num_kv_heads=4,
    global_keys_as_values=True,
    d_ff=21504,
    vocab_size=262144,
    rope_theta=1_000_000.0,
    rope_scaling=RopeScaling(kind="proportional", factor=1.0, turning=0.25),
    local_rope_theta=10_000.0,
    local_rope_scaling=False,
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
    value_norm=True,
    sliding_window=1024,
    activation="gelu",
    post_norms=True,
    layer_scale=True,
    embed_scale=True,
    attention_multiplier=1.0,
    logits_softcap=30.0,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/gemma_4_31b"),
        model=MODEL,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
