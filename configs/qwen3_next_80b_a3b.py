"""Qwen3-Next-80B-A3B, a hybrid with 512 experts: python -m jaxpar.train qwen3_next_80b_a3b

A token uses 10 experts. Of every four layers, three have Gated DeltaNet in place of attention
(docs/hybrid.md). Pre-training 79.7B parameters takes 1,275 GB of weights, gradients and moments: at
least sixteen H200.
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
        run=RunConfig(dir="runs/qwen3_next_80b_a3b"),
        model=ModelConfig(
            num_layers=48,
            layer_pattern="GGG*",
            d_model=2048,
            num_heads=16,
            num_kv_heads=2,
            head_dim=256,
            rope_fraction=0.25,
            rope_theta=10_000_000.0,
            attention_gate=True,
            qk_norm=True,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            conv_kernel_size=4,
            num_experts=512,
            experts_per_token=10,
            d_ff=512,
            num_shared_experts=1,
            shared_expert_gate=True,
            vocab_size=151_936,
            norm_eps=1e-6,
            norm_offset=True,
        ),
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=64, balance_loss=1e-3),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
