"""The quickstart with 8 experts of which a token uses 2: python -m jaxpar.train quickstart_moe"""

from jaxpar.config import (
    Attention,
    CheckpointConfig,
    ComputeConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    Experts,
    Glu,
    Layer,
    Model,
    OptimizerConfig,
    ParallelConfig,
    Router,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=32)
    experts = Experts(
        expert=Glu(192), num_experts=8, experts_per_token=2, router=Router(balancing_bias=True)
    )
    layer = Layer("layers", attention, experts)
    model = Model(
        d_model=128,
        vocab_size=272,  # 256 bytes and an end-of-text token, rounded up so meshes divide it
        layers=[layer] * 4,
        tie_embeddings=True,
    )
    return Config(
        run=RunConfig(dir="runs/quickstart_moe"),
        model=model,
        compute=ComputeConfig(dtype="float32"),
        data=DataConfig(path="data/stdlib-bytes", seq_len=64),
        train=TrainConfig(
            num_steps=200,
            global_batch_size=32,
            balance_loss=1e-4,
            router_bias_rate=3e-3,
            log_every=10,
        ),
        parallel=ParallelConfig(data=-1),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(every=100, num_batches=4),
    )
