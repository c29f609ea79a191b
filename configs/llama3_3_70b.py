"""Llama 3.3 70B on 64 GPUs, or 8 times any other power of two: python -m jaxpar.train llama3_3_70b

Shape: the published Llama 3.3 70B (also Llama 3.1 70B), which is Llama 3 70B with scaled RoPE.
--run.init-from takes the published weights (docs/convert.md).
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    Glu,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    Rope,
    RopeScaling,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(
        num_heads=64, num_kv_heads=8, head_dim=128, rope=Rope(scaling=RopeScaling())
    )
    layer = Layer("layers", attention, Glu(28_672))
    model = Model(
        d_model=8192,
        vocab_size=128_256,
        layers=[layer] * 80,
    )
    return Config(
        run=RunConfig(dir="runs/llama3_3_70b"),
        model=model,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=512),
        parallel=ParallelConfig(data=-1, tensor=8, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=2000),
    )
