"""OLMo Hybrid 7B, with Gated DeltaNet: python -m jaxpar.train olmo_hybrid_7b

Of every four layers, three have Gated DeltaNet in place of attention (docs/architectures.md), and
norms of inputs; the fourth has norms of outputs, as OLMo 3's, and no positions. Pre-training 7.4B
parameters takes 119 GB of weights, gradients and moments: at least two H200. It was not measured.
Keys are 96 wide, for which recurrences have no kernel: they run in plain JAX.
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    GatedDeltaNet,
    Glu,
    Layer,
    Model,
    Norm,
    OptimizerConfig,
    ParallelConfig,
    QkNorm,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    delta_net = GatedDeltaNet(
        num_key_heads=30,
        num_value_heads=30,
        key_head_dim=96,
        value_head_dim=192,
        allow_neg_eigval=True,
    )
    attention = Attention(
        num_heads=30, num_kv_heads=30, head_dim=128, rope=None, qk_norm=QkNorm(over="all")
    )
    feed_forward = Glu(11_008)
    delta = Layer("delta_layers", delta_net, feed_forward)
    attends = Layer("layers", attention, feed_forward, norms="after")
    model = Model(
        d_model=3840,
        vocab_size=100_352,
        layers=([delta] * 3 + [attends]) * 8,
        norm=Norm(eps=1e-06),
    )
    return Config(
        run=RunConfig(dir="runs/olmo_hybrid_7b"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=8192),
        train=TrainConfig(num_steps=1000, global_batch_size=32),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
