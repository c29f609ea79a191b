"""Llama 3 70B on 64 GPUs, or 8 times any other power of two: python -m jaxpar.train llama3_70b

Shape: Llama 3 (2407.21783), table 3. Tensor parallelism within a host, FSDP across hosts.
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
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(num_heads=64, num_kv_heads=8, head_dim=128)
    layer = Layer("layers", attention, Glu(28_672))
    model = Model(
        d_model=8192,
        vocab_size=128_256,
        layers=[layer] * 80,
    )
    return Config(
        run=RunConfig(dir="runs/llama3_70b"),
        model=model,
        data=DataConfig(seq_len=8192),
        train=TrainConfig(num_steps=100_000, global_batch_size=512),
        parallel=ParallelConfig(data=-1, tensor=8, remat="attn_out", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=2000),
    )
