"""Kimi K2, DeepSeek-V3's layers with 384 experts: python -m jaxpar.train kimi_k2

A token uses 8 of the experts of a layer and a shared one; a bias balances them (docs/experts.md,
docs/latent_attention.md). Pre-training 1.03T parameters takes 16.4 TB of weights, gradients and
moments: at least 256 H200, with --parallel.expert.
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


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/kimi_k2"),
        model=ModelConfig(
            num_layers=61,
            d_model=7168,
            num_heads=64,
            num_kv_heads=64,
            head_dim=192,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_rope_head_dim=64,
            v_head_dim=128,
            d_ff=2048,
            num_experts=384,
            experts_per_token=8,
            num_shared_experts=1,
            dense_layers=1,
            dense_d_ff=18432,
            router_score="sigmoid",
            router_bias=True,
            router_scale=2.827,
            vocab_size=163840,
            rope_theta=50_000.0,
            rope_layout="interleaved",
            rope_scaling=RopeScaling(
                kind="yarn",
                factor=32.0,
                original_max_position=4096,
                beta_fast=1.0,
                attention_factor=1.0,
                mscale_all_dim=1.0,
            ),
            norm_eps=1e-6,
        ),
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=512, balance_loss=1e-4),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=100),
    )
