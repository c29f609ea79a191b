"""Llama 4 Scout 17B-16E (text): python -m jaxpar.train llama4_scout

Three of four layers attend within chunks of 8192 tokens; every fourth attends to all, without a
rotary embedding (docs/long_context.md#chunks). A token uses one of 16 experts, and a shared one.
Pre-training 108B parameters takes 1.7 TB of weights, gradients and moments: at least sixteen H200.
"""

from jaxpar.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/llama4_scout"),
        model=ModelConfig(
            num_layers=48,
            d_model=5120,
            num_heads=40,
            num_kv_heads=8,
            head_dim=128,
            d_ff=8192,
            num_experts=16,
            experts_per_token=1,
            num_shared_experts=1,
            normalize_experts=False,
            router_score="sigmoid",
            router_scales_input=True,
            vocab_size=202048,
            rope_theta=500_000.0,
            rope_layout="interleaved",
            norm_eps=1e-5,
            qk_norm=True,
            qk_norm_gain=False,
            attention_chunk=8192,
            global_every=4,
            nope_every=4,
            nope_query_beta=0.1,
        ),
        data=DataConfig(path="data/stdlib", seq_len=16384),
        train=TrainConfig(num_steps=1000, global_batch_size=32, balance_loss=1e-3),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
    )
