"""Kimi K2, DeepSeek-V3's layers with 384 experts: python -m jaxpar.train kimi_k2

A token uses 8 of the experts of a layer and a shared one; a bias balances them (docs/experts.md,
docs/latent_attention.md). Pre-training 1.03T parameters takes 16.4 TB of weights, gradients and
moments: at least 256 H200, with --parallel.expert.
"""

from jaxpar.config import (
    Config,
    DataConfig,
    Experts,
    Glu,
    LatentAttention,
    Layer,
    Model,
    Norm,
    OptimizerConfig,
    ParallelConfig,
    Rope,
    RopeScaling,
    Router,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = LatentAttention(
        num_heads=64,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kv_lora_rank=512,
        q_lora_rank=1536,
        rope=Rope(
            theta=50_000.0,
            scaling=RopeScaling(
                kind="yarn",
                factor=32.0,
                original_max_position=4096,
                beta_fast=1.0,
                attention_factor=1.0,
                mscale_all_dim=1.0,
            ),
            layout="interleaved",
        ),
    )
    experts = Experts(
        expert=Glu(2048),
        num_experts=384,
        experts_per_token=8,
        router=Router(score="sigmoid", balancing_bias=True, scale=2.827),
        num_shared_experts=1,
    )
    dense = Layer("dense_layers", attention, Glu(18_432))
    moe = Layer("layers", attention, experts)
    model = Model(
        d_model=7168,
        vocab_size=163_840,
        layers=[dense] + [moe] * 60,
        norm=Norm(eps=1e-06),
    )
    return Config(
        run=RunConfig(dir="runs/kimi_k2"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=512, balance_loss=1e-4),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=100),
    )
