"""Nemotron-H-8B, a hybrid with Mamba-2: python -m jaxpar.train nemotron_h_8b

Of 52 layers, 24 are Mamba-2, 24 MLPs and 4 attention (docs/hybrid.md). Pre-training 8.1B parameters
takes 130 GB of weights, gradients and moments: at least four H100 or two H200.
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
        run=RunConfig(dir="runs/nemotron_h_8b"),
        model=ModelConfig(
            num_layers=52,
            layer_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            d_model=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            d_ff=21504,
            mlp_gate=False,
            activation="relu_squared",
            rope_fraction=0.0,
            mamba_num_heads=128,
            mamba_head_dim=64,
            mamba_state_size=128,
            mamba_num_groups=8,
            mamba_min_step=0.001,
            conv_kernel_size=4,
            vocab_size=131072,
            norm_eps=1e-5,
        ),
        data=DataConfig(path="data/stdlib", seq_len=8192),
        train=TrainConfig(num_steps=1000, global_batch_size=32),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
