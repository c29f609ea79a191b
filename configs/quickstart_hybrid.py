"""The quickstart as a hybrid model: python -m jaxpar.train quickstart_hybrid

Its layers are those of Qwen3-Next, without experts: of every four, three have Gated DeltaNet in
place of attention (docs/hybrid.md).
"""

from jaxpar.config import (
    Attention,
    CheckpointConfig,
    ComputeConfig,
    Config,
    DataConfig,
    EvaluationConfig,
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
        num_key_heads=4, num_value_heads=8, key_head_dim=16, value_head_dim=16
    )
    attention = Attention(
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope=Rope(fraction=0.25),
        qk_norm=QkNorm(),
        gate=True,
    )
    feed_forward = Glu(384)
    delta = Layer("delta_layers", delta_net, feed_forward)
    attends = Layer("layers", attention, feed_forward)
    model = Model(
        d_model=128,
        vocab_size=272,  # 256 bytes and an end-of-text token, rounded up so meshes divide it
        layers=[delta] * 3 + [attends],
        tie_embeddings=True,
        norm=Norm(offset=True),
    )
    return Config(
        run=RunConfig(dir="runs/quickstart_hybrid"),
        model=model,
        compute=ComputeConfig(dtype="float32"),
        data=DataConfig(path="data/stdlib-bytes", seq_len=64),
        train=TrainConfig(num_steps=200, global_batch_size=32, log_every=10),
        parallel=ParallelConfig(data=-1),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(every=100, num_batches=4),
    )
