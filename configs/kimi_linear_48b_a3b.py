"""Kimi-Linear-48B-A3B, a hybrid with 256 experts: python -m jaxpar.train kimi_linear_48b_a3b

A token uses 8 of the experts of a layer and a shared one; a bias balances them
(docs/architectures.md). Of every four layers, three have Kimi Delta Attention, and one latent
attention without positions (docs/architectures.md). The first layer is dense, and the last has
attention. Pre-training 49.1B parameters takes 786 GB of weights, gradients and moments: at least
eight H200.
"""

from jaxpar.config import (
    Config,
    DataConfig,
    Experts,
    Glu,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    Router,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    delta = KimiDeltaAttention(num_heads=32, key_head_dim=128, value_head_dim=128)
    attention = LatentAttention(
        num_heads=32,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kv_lora_rank=512,
        rope=None,
    )
    experts = Experts(
        expert=Glu(1024),
        num_experts=256,
        experts_per_token=8,
        router=Router(score="sigmoid", balancing_bias=True, scale=2.446),
        num_shared_experts=1,
    )
    first = Layer("kda_dense_layers", delta, Glu(9216))
    kda = Layer("kda_layers", delta, experts)
    attends = Layer("layers", attention, experts)
    model = Model(
        d_model=2304,
        vocab_size=163_840,
        layers=[first, kda, kda, attends] + ([kda] * 3 + [attends]) * 5 + [kda, kda, attends],
    )
    return Config(
        run=RunConfig(dir="runs/kimi_linear_48b_a3b"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=64, balance_loss=1e-4),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=100),
    )
