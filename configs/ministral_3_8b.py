"""Ministral 3 8B (its text part), for several GPUs: python -m jaxpar.train ministral_3_8b

Shape: the text part of the published mistralai/Ministral-3-8B-Base-2512, with YaRN and queries that
grow with the position. --run.init-from takes weights of the class Ministral3ForCausalLM.
"""

from jaxpar.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RopeScaling,
    RunConfig,
    TrainConfig,
)

MODEL = ModelConfig(
    num_layers=34,
    d_model=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    d_ff=14336,
    vocab_size=131072,
    rope_theta=1_000_000.0,
    rope_scaling=RopeScaling(
        kind="yarn",
        factor=16.0,
        original_max_position=16384,
        attention_factor=1.0,
        query_beta=0.1,
    ),
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/ministral_3_8b"),
        model=MODEL,
        data=DataConfig(seq_len=4096),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
