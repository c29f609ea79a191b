"""gpt-oss-20b, 32 experts of which a token uses 4: python -m jaxpar.train gpt_oss_20b

Attention with sinks, with a window of 128 tokens in every second layer. --run.init-from takes the
published weights, in MXFP4 (docs/convert.md). Pre-training 20.9B parameters takes 335 GB of
weights, gradients and moments: at least four H200.
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
        run=RunConfig(dir="runs/gpt_oss_20b"),
        model=ModelConfig(
            num_layers=24,
            d_model=2880,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            d_ff=2880,
            num_experts=32,
            experts_per_token=4,
            expert_bias=True,
            router_linear_bias=True,
            activation="clamped_swiglu",
            vocab_size=201088,
            rope_theta=150_000.0,
            rope_scaling=RopeScaling(
                kind="yarn", factor=32.0, original_max_position=4096, truncate=False
            ),
            norm_eps=1e-5,
            qkv_bias=True,
            out_bias=True,
            attention_sinks=True,
            sliding_window=128,
            global_every=2,
        ),
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-3),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
