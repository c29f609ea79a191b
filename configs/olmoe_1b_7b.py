"""OLMoE-1B-7B, 64 experts of which a token uses 8: python -m jaxpar.train olmoe_1b_7b

Each GPU gathers a layer's experts (docs/architectures.md).
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Experts,
    Glu,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    QkNorm,
    Rope,
    Router,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        rope=Rope(theta=10_000.0),
        qk_norm=QkNorm(over="all"),
    )
    experts = Experts(
        expert=Glu(1024), num_experts=64, experts_per_token=8, router=Router(normalize=False)
    )
    layer = Layer("layers", attention, experts)
    model = Model(
        d_model=2048,
        vocab_size=50_304,
        layers=[layer] * 16,
    )
    return Config(
        run=RunConfig(dir="runs/olmoe_1b_7b"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(
            num_steps=1000, global_batch_size=32, balance_loss=1e-2, router_z_loss=1e-3
        ),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=100),
    )
