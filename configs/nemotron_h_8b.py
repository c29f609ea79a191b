"""Nemotron-H-8B, a hybrid with Mamba-2: python -m jaxpar.train nemotron_h_8b

Of 52 layers, 24 are Mamba-2, 24 MLPs and 4 attention (docs/architectures.md). Pre-training 8.1B
parameters takes 130 GB of weights, gradients and moments: at least four H100 or two H200.
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Layer,
    Mamba2,
    Mlp,
    Model,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    mamba = Mamba2(num_heads=128, head_dim=64, state_size=128, num_groups=8, min_step=0.001)
    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=128, rope=None)
    mamba_layer = Layer("mamba_layers", mamba, None)
    mlp = Layer("mlp_layers", None, Mlp(21_504, activation="relu_squared"))
    attends = Layer("layers", attention, None)
    kinds = {"M": mamba_layer, "-": mlp, "*": attends}
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    model = Model(
        d_model=4096,
        vocab_size=131_072,
        layers=[kinds[letter] for letter in pattern],
    )
    return Config(
        run=RunConfig(dir="runs/nemotron_h_8b"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=8192),
        train=TrainConfig(num_steps=1000, global_batch_size=32),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
