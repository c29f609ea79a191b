"""Gemma 3 12B (its text part): python -m jaxpar.train gemma_3/12b

Shape: the text part of the published google/gemma-3-12b-pt; Gemma 3 (2503.19786), section 2. Five
of six layers have a window. --run.init-from takes weights of the class Gemma3ForCausalLM
(docs/convert.md).
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
    num_layers=48,
    d_model=3840,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    d_ff=15360,
    vocab_size=262208,
    rope_theta=1_000_000.0,
    local_rope_theta=10_000.0,
    local_rope_scaling=False,
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
    sliding_window=1024,
    global_every=6,
    activation="gelu",
    post_norms=True,
    norm_offset=True,
    embed_scale=True,
    query_scale_dim=256,
    rope_scaling=RopeScaling(
        kind="linear",
        factor=8.0,
    ),
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/gemma_3_12b"),
        model=MODEL,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
