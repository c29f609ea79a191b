"""OLMo Hybrid 7B, with Gated DeltaNet: python -m jaxpar.train olmo_hybrid_7b

Of every four layers, three have Gated DeltaNet in place of attention (docs/hybrid.md), and norms of
inputs; the fourth has norms of outputs, as OLMo 3's, and no positions. Pre-training 7.4B parameters
takes 119 GB of weights, gradients and moments: at least two H200. It was not measured.
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
        run=RunConfig(dir="runs/olmo_hybrid_7b"),
        model=ModelConfig(
            num_layers=32,
            layer_pattern="GGG*",
            d_model=3840,
            num_heads=30,
            num_kv_heads=30,
            head_dim=128,
            d_ff=11008,
            qk_norm=True,
            qk_norm_over="all",
            pre_norms=False,
            post_norms=True,
            rope_fraction=0.0,
            recurrent_norms="before",
            linear_num_key_heads=30,
            linear_num_value_heads=30,
            linear_key_head_dim=96,
            linear_value_head_dim=192,
            linear_allow_neg_eigval=True,
            linear_norm_eps=1e-5,
            conv_kernel_size=4,
            vocab_size=100352,
            norm_eps=1e-6,
        ),
        data=DataConfig(path="data/stdlib", seq_len=8192),
        train=TrainConfig(num_steps=1000, global_batch_size=32),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
