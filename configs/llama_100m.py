"""A Llama of 100M parameters for experiments, on one GPU: python -m jaxpar.train llama_100m

Llama's shape in small, with tied embeddings, for comparisons that need several runs, as in
scripts/measure/optimizers.py. 1.3B tokens in 10,000 steps.
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    EvaluationConfig,
    Glu,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(num_heads=12, num_kv_heads=4, head_dim=64)
    layer = Layer("layers", attention, Glu(2048))
    model = Model(
        d_model=768,
        vocab_size=32_000,
        layers=[layer] * 12,
        tie_embeddings=True,
    )
    return Config(
        run=RunConfig(dir="runs/llama_100m"),
        model=model,
        data=DataConfig(seq_len=1024),
        train=TrainConfig(num_steps=10_000, global_batch_size=128),
        parallel=ParallelConfig(data=-1, remat="none", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=500),
        evaluation=EvaluationConfig(every=500, num_batches=16),
    )
