"""DeepSeek-V2-Lite, latent attention and 64 experts: python -m jaxpar.train deepseek_v2_lite

A token uses 6 of the experts of a layer, and 2 shared ones (docs/architectures.md). Pre-training
15.7B parameters takes 251 GB of weights, gradients and moments: at least four H200.
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
        num_heads=16,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kv_lora_rank=512,
        rope=Rope(
            theta=10_000.0,
            scaling=RopeScaling(
                kind="yarn",
                factor=40.0,
                original_max_position=4096,
                attention_factor=1.0,
                mscale_all_dim=0.707,
            ),
            layout="interleaved",
        ),
    )
    experts = Experts(
        expert=Glu(1408),
        num_experts=64,
        experts_per_token=6,
        router=Router(normalize=False),
        num_shared_experts=2,
    )
    dense = Layer("dense_layers", attention, Glu(10_944))
    moe = Layer("layers", attention, experts)
    model = Model(
        d_model=2048,
        vocab_size=102_400,
        layers=[dense] + [moe] * 26,
        norm=Norm(eps=1e-06),
    )
    return Config(
        run=RunConfig(dir="runs/deepseek_v2_lite"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-3),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
