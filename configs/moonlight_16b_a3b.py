"""Moonlight-16B-A3B, layers of DeepSeek-V3: python -m jaxpar.train moonlight_16b_a3b

A token uses 6 of the 64 experts of a layer, and 2 shared ones; a bias balances them
(docs/experts.md, docs/latent_attention.md). Pre-training 16.0B parameters takes 255 GB of weights,
gradients and moments: at least four H200.
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


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/moonlight_16b_a3b"),
        model=ModelConfig(
            num_layers=27,
            d_model=2048,
            num_heads=16,
            num_kv_heads=16,
            head_dim=192,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            v_head_dim=128,
            d_ff=1408,
            num_experts=64,
            experts_per_token=6,
            num_shared_experts=2,
            dense_layers=1,
            dense_d_ff=11264,
            router_score="sigmoid",
            router_bias=True,
            router_scale=2.446,
            vocab_size=163840,
            rope_theta=50_000.0,
            rope_layout="interleaved",
            norm_eps=1e-5,
        ),
        data=DataConfig(path="data/stdlib", seq_len=8192),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-4),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
