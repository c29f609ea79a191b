"""Moonlight-16B-A3B, layers of DeepSeek-V3: python -m jaxpar.train moonlight_16b_a3b

A token uses 6 of the 64 experts of a layer, and 2 shared ones; a bias balances them
(docs/architectures.md). Pre-training 16.0B parameters takes 255 GB of weights,
gradients and moments: at least four H200.
"""

from jaxpar.config import (
    Config,
    DataConfig,
    Experts,
    Glu,
    LatentAttention,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    Rope,
    Router,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = LatentAttention(
        num_heads=16,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kv_lora_rank=512,
        rope=Rope(theta=50_000.0, layout="interleaved"),
    )
    experts = Experts(
        expert=Glu(1408),
        num_experts=64,
        experts_per_token=6,
        router=Router(score="sigmoid", balancing_bias=True, scale=2.446),
        num_shared_experts=2,
    )
    dense = Layer("dense_layers", attention, Glu(11_264))
    moe = Layer("layers", attention, experts)
    model = Model(
        d_model=2048,
        vocab_size=163_840,
        layers=[dense] + [moe] * 26,
    )
    return Config(
        run=RunConfig(dir="runs/moonlight_16b_a3b"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=8192),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-4),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
