"""Gemma 2 9B: python -m jaxpar.train gemma_2/9b

Shape: the published google/gemma-2-9b; Gemma 2 (2408.00118), table 1. Scores and logits are capped,
and every second layer has a window. --run.init-from takes the published weights (docs/convert.md).
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
    num_layers=42,
    d_model=3584,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    d_ff=14336,
    vocab_size=256000,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    tie_embeddings=True,
    sliding_window=4096,
    global_every=2,
    activation="gelu",
    post_norms=True,
    norm_offset=True,
    embed_scale=True,
    query_scale_dim=256,
    attention_softcap=50.0,
    logits_softcap=30.0,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/gemma_2_9b"),
        model=MODEL,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
