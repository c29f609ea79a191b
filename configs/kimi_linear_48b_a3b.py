"""Kimi-Linear-48B-A3B, a hybrid with 256 experts: python -m jaxpar.train kimi_linear_48b_a3b

A token uses 8 of the experts of a layer and a shared one; a bias balances them (docs/experts.md).
Of every four layers, three have Kimi Delta Attention, and one latent attention without positions
(docs/hybrid.md). The first layer is dense, and the last has attention, so the pattern is that of
the whole model. Pre-training 49.1B parameters takes 786 GB of weights, gradients and moments: at
least eight H200.
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
        run=RunConfig(dir="runs/kimi_linear_48b_a3b"),
        model=ModelConfig(
            num_layers=27,
            layer_pattern="kKK*" + "KKK*" * 5 + "KK*",
            d_model=2304,
            num_heads=32,
            num_kv_heads=32,
            head_dim=192,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            v_head_dim=128,
            rope_fraction=0.0,
            linear_num_key_heads=32,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            conv_kernel_size=4,
            num_experts=256,
            experts_per_token=8,
            d_ff=1024,
            num_shared_experts=1,
            dense_d_ff=9216,
            router_score="sigmoid",
            router_bias=True,
            router_scale=2.446,
            vocab_size=163_840,
            norm_eps=1e-5,
        ),
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=64, balance_loss=1e-4),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=100),
    )
