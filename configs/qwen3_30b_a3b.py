"""Qwen3-30B-A3B, 128 experts of which a token uses 8: python -m jaxpar.train qwen3_30b_a3b

Each GPU gathers a layer's experts, or has some of them with --parallel.expert
(docs/architectures.md). Pre-training 30.5B parameters takes 489 GB of weights, gradients and
moments: at least eight H200.
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Experts,
    Glu,
    Layer,
    Model,
    Norm,
    OptimizerConfig,
    ParallelConfig,
    QkNorm,
    Rope,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(
        num_heads=32, num_kv_heads=4, head_dim=128, rope=Rope(theta=1_000_000.0), qk_norm=QkNorm()
    )
    experts = Experts(expert=Glu(768), num_experts=128, experts_per_token=8)
    layer = Layer("layers", attention, experts)
    model = Model(
        d_model=2048,
        vocab_size=151_936,
        layers=[layer] * 48,
        norm=Norm(eps=1e-06),
    )
    return Config(
        run=RunConfig(dir="runs/qwen3_30b_a3b"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-3),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
