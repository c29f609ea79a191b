"""DeepSeek-V3, latent attention and 256 experts: python -m jaxpar.train deepseek_v3

A token uses 8 of the experts of a layer, of 4 of 8 groups, and a shared one; a bias balances them
(docs/experts.md, docs/latent_attention.md). Pre-training 671B parameters takes 10.7 TB of weights,
gradients and moments: at least 128 H200, with --parallel.expert.
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
        run=RunConfig(dir="runs/deepseek_v3"),
        model=ModelConfig(
            num_layers=61,
            d_model=7168,
            num_heads=128,
            num_kv_heads=128,
            head_dim=192,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_rope_head_dim=64,
            v_head_dim=128,
            d_ff=2048,
            num_experts=256,
            experts_per_token=8,
            num_shared_experts=1,
            dense_layers=3,
            dense_d_ff=18432,
            router_score="sigmoid",
            router_bias=True,
            router_groups=8,
            router_groups_per_token=4,
            router_scale=2.5,
            vocab_size=129280,
            rope_theta=10_000.0,
            rope_layout="interleaved",
            rope_scaling=RopeScaling(
                kind="yarn",
                factor=40.0,
                original_max_position=4096,
                attention_factor=1.0,
                mscale_all_dim=1.0,
            ),
            norm_eps=1e-6,
        ),
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=512, balance_loss=1e-4),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=2.2e-4, warmup_steps=100),
    )
