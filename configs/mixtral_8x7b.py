"""Mixtral 8x7B, 8 experts of which a token uses 2: python -m jaxpar.train mixtral_8x7b

Each GPU gathers a layer's experts (docs/architectures.md). Pre-training 46.7B parameters takes 747
GB of weights, gradients and moments: at least eight H200.
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
    Rope,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=128, rope=Rope(theta=1_000_000.0))
    experts = Experts(expert=Glu(14_336), num_experts=8, experts_per_token=2)
    layer = Layer("layers", attention, experts)
    model = Model(
        d_model=4096,
        vocab_size=32_000,
        layers=[layer] * 32,
    )
    return Config(
        run=RunConfig(dir="runs/mixtral_8x7b"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=2e-2),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
