"""Qwen3-Next-80B-A3B, a hybrid with 512 experts: python -m jaxpar.train qwen3_next_80b_a3b

A token uses 10 experts. Of every four layers, three have Gated DeltaNet in place of attention
(docs/architectures.md). Pre-training 79.7B parameters takes 1,275 GB of weights, gradients and
moments: at least sixteen H200.
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Experts,
    GatedDeltaNet,
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
    delta_net = GatedDeltaNet(
        norm_eps=1e-06, num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128
    )
    attention = Attention(
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        rope=Rope(theta=10_000_000.0, fraction=0.25),
        qk_norm=QkNorm(),
        gate=True,
    )
    experts = Experts(
        expert=Glu(512),
        num_experts=512,
        experts_per_token=10,
        num_shared_experts=1,
        shared_expert_gate=True,
    )
    delta = Layer("delta_layers", delta_net, experts)
    attends = Layer("layers", attention, experts)
    model = Model(
        d_model=2048,
        vocab_size=151_936,
        layers=([delta] * 3 + [attends]) * 12,
        norm=Norm(eps=1e-06, offset=True),
    )
    return Config(
        run=RunConfig(dir="runs/qwen3_next_80b_a3b"),
        model=model,
        data=DataConfig(path="data/stdlib", seq_len=4096),
        train=TrainConfig(num_steps=1000, global_batch_size=64, balance_loss=1e-3),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
