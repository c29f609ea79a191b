"""Granite 4.1 3B, for one GPU or several: python -m jaxpar.train granite_4_1_3b

Shape: the published ibm-granite/granite-4.1-3b-base, with its factors of embeddings, branches,
scores and logits. --run.init-from takes the published weights (docs/convert.md).
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
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(
        num_heads=40, num_kv_heads=8, head_dim=64, rope=Rope(theta=10_000_000.0), scale=0.015625
    )
    layer = Layer("layers", attention, Glu(8192))
    model = Model(
        d_model=2560,
        vocab_size=100_352,
        layers=[layer] * 40,
        tie_embeddings=True,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=10.0,
    )
    return Config(
        run=RunConfig(dir="runs/granite_4_1_3b"),
        model=model,
        data=DataConfig(seq_len=4096),
        train=TrainConfig(num_steps=100_000, global_batch_size=256),
        parallel=ParallelConfig(data=-1, layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    )
