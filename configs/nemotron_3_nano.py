"""Nemotron 3 Nano 30B-A3B, a hybrid with experts: python -m jaxpar.train nemotron_3_nano

Of 52 layers, 23 are Mamba-2, 23 have 128 experts of two matrices and a shared one, and 6 attention
(docs/hybrid.md). Of 31.6B parameters, a token uses 3.6B with its embedding. Pre-training them takes
505 GB of weights, gradients and moments: at least eight H200 or sixteen H100.
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
        run=RunConfig(dir="runs/nemotron_3_nano"),
        model=ModelConfig(
            num_layers=52,
            layer_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            d_model=2688,
            num_heads=32,
            num_kv_heads=2,
            head_dim=128,
            d_ff=1856,
            mlp_gate=False,
            activation="relu_squared",
            num_experts=128,
            experts_per_token=6,
            num_shared_experts=2,
            router_score="sigmoid",
            router_bias=True,
            router_scale=2.5,
            rope_fraction=0.0,
            mamba_num_heads=64,
            mamba_head_dim=64,
            mamba_state_size=128,
            mamba_num_groups=8,
            mamba_min_step=0.001,
            conv_kernel_size=4,
            vocab_size=131072,
            norm_eps=1e-5,
        ),
        data=DataConfig(path="data/stdlib", seq_len=8192),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-4),
        parallel=ParallelConfig(expert=8, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
