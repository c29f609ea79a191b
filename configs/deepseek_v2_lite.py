"""DeepSeek-V2-Lite, latent attention and 64 experts: python -m jaxpar.train deepseek_v2_lite

A token uses 6 of the experts of a layer, and 2 shared ones (docs/experts.md,
docs/latent_attention.md). Pre-training 15.7B parameters takes 251 GB of weights, gradients and
moments: at least four H200.
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
        run=RunConfig(dir="runs/deepseek_v2_lite"),
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
            normalize_experts=False,
            num_shared_experts=2,
            dense_layers=1,
            dense_d_ff=10944,
            vocab_size=102400,
            rope_theta=10_000.0,
            rope_layout="interleaved",
            rope_scaling=RopeScaling(
                kind="yarn",
                factor=40.0,
                original_max_position=4096,
                attention_factor=1.0,
                mscale_all_dim=0.707,
            ),
            norm_eps=1e-6,
        ),
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-3),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
