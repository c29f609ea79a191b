"""Gemma 3 270M: python -m jaxpar.train gemma_3/270m

Shape: the published google/gemma-3-270m; Gemma 3 (2503.19786), section 2. Five of six layers have a
window. --run.init-from takes the published weights (docs/convert.md).
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
    num_layers=18,
    d_model=640,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    d_ff=2048,
    vocab_size=262144,
    rope_theta=1_000_000.0,
    local_rope_theta=10_000.0,
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
    sliding_window=512,
    global_every=6,
    activation="gelu",
    post_norms=True,
    norm_offset=True,
    embed_scale=True,
    query_scale_dim=256,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/gemma_3_270m"),
        model=MODEL,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
