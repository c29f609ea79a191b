"""Nemotron 3 Nano 30B-A3B, a hybrid with experts: python -m jaxpar.train nemotron_3_nano

Of 52 layers, 23 are Mamba-2, 23 have 128 experts of two matrices and a shared one, and 6 attention
(docs/architectures.md). Of 31.6B parameters, a token uses 3.6B with its embedding. Pre-training
them takes 505 GB of weights, gradients and moments: at least eight H200 or sixteen H100.
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Experts,
    Layer,
    Mamba2,
    Mlp,
    Model,
    OptimizerConfig,
    ParallelConfig,
    Router,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    mamba = Mamba2(num_heads=64, head_dim=64, state_size=128, num_groups=8, min_step=0.001)
    attention = Attention(num_heads=32, num_kv_heads=2, head_dim=128, rope=None)
    experts = Experts(
        expert=Mlp(1856, activation="relu_squared"),
        num_experts=128,
        experts_per_token=6,
        router=Router(score="sigmoid", balancing_bias=True, scale=2.5),
        num_shared_experts=2,
    )
    mamba_layer = Layer("mamba_layers", mamba, None)
    moe = Layer("moe_layers", None, experts)
    attends = Layer("layers", attention, None)
    kinds = {"M": mamba_layer, "E": moe, "*": attends}
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    model = Model(
        d_model=2688,
        vocab_size=131_072,
        layers=[kinds[letter] for letter in pattern],
    )
    return Config(
        run=RunConfig(dir="runs/nemotron_3_nano"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=8192),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-4),
        parallel=ParallelConfig(expert=8, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
