"""Ministral 3 8B (its text part), for several GPUs: python -m jaxpar.train ministral_3_8b

Shape: the text part of the published mistralai/Ministral-3-8B-Base-2512, with YaRN and queries that
grow with the position. --run.init-from takes weights of the class Ministral3ForCausalLM.
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
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope=Rope(
            theta=1_000_000.0,
            scaling=RopeScaling(
                kind="yarn",
                factor=16.0,
                original_max_position=16_384,
                query_beta=0.1,
                attention_factor=1.0,
            ),
        ),
    )
    layer = Layer("layers", attention, Glu(14_336))
    model = Model(
        d_model=4096,
        vocab_size=131_072,
        layers=[layer] * 34,
    )
    return Config(
        run=RunConfig(dir="runs/ministral_3_8b"),
        model=model,
        data=DataConfig(seq_len=4096),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
