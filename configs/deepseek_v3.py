"""DeepSeek-V3, latent attention and 256 experts: python -m jaxpar.train deepseek_v3

A token uses 8 of the experts of a layer, of 4 of 8 groups, and a shared one; a bias balances them
(docs/architectures.md). Pre-training 671B parameters takes 10.7 TB of weights,
gradients and moments: at least 128 H200, with --parallel.expert.
"""

from jaxpar.config import (
    Config,
    DataConfig,
    Experts,
    Glu,
    LatentAttention,
    Layer,
    Model,
    Norm,
    OptimizerConfig,
    ParallelConfig,
    Rope,
    RopeScaling,
    Router,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = LatentAttention(
        num_heads=128,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kv_lora_rank=512,
        q_lora_rank=1536,
        rope=Rope(
            theta=10_000.0,
            scaling=RopeScaling(
                kind="yarn",
                factor=40.0,
                original_max_position=4096,
                attention_factor=1.0,
                mscale_all_dim=1.0,
            ),
            layout="interleaved",
        ),
    )
    experts = Experts(
        expert=Glu(2048),
        num_experts=256,
        experts_per_token=8,
        router=Router(
            score="sigmoid", balancing_bias=True, groups=8, groups_per_token=4, scale=2.5
        ),
        num_shared_experts=1,
    )
    dense = Layer("dense_layers", attention, Glu(18_432))
    moe = Layer("layers", attention, experts)
    model = Model(
        d_model=7168,
        vocab_size=129_280,
        layers=[dense] * 3 + [moe] * 58,
        norm=Norm(eps=1e-06),
    )
    return Config(
        run=RunConfig(dir="runs/deepseek_v3"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=512, balance_loss=1e-4),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=2.2e-4, warmup_steps=100),
    )
