"""A small Llama on the Python standard library's source, for a laptop: make quickstart"""

from jaxpar.config import (
    Attention,
    CheckpointConfig,
    ComputeConfig,
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
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=32)
    layer = Layer("layers", attention, Glu(384))
    model = Model(
        d_model=128,
        vocab_size=272,  # 256 bytes and an end-of-text token, rounded up so meshes divide it
        layers=[layer] * 4,
        tie_embeddings=True,
    )
    return Config(
        run=RunConfig(dir="runs/quickstart"),
        model=model,
        compute=ComputeConfig(dtype="float32"),
        data=DataConfig(path="data/stdlib-bytes", seq_len=256),
        train=TrainConfig(num_steps=200, global_batch_size=16, log_every=10),
        parallel=ParallelConfig(data=-1),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(every=100, num_batches=4),
    )
