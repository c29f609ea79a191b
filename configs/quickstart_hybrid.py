"""The quickstart as a hybrid model: python -m jaxpar.train quickstart_hybrid

Its layers are those of Qwen3-Next, without experts: of every four, three have Gated DeltaNet in
place of attention (docs/hybrid.md).
"""

from jaxpar.config import (
    CheckpointConfig,
    ComputeConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/quickstart_hybrid"),
        model=ModelConfig(
            num_layers=4,
            layer_pattern="GGG*",
            d_model=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            d_ff=384,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            attention_gate=True,
            norm_offset=True,
            qk_norm=True,
            rope_fraction=0.25,
            vocab_size=272,  # 256 bytes and an end-of-text token, rounded up so meshes divide it
            tie_embeddings=True,
        ),
        compute=ComputeConfig(dtype="float32"),
        data=DataConfig(path="data/stdlib-bytes", seq_len=64),
        train=TrainConfig(num_steps=200, global_batch_size=32, log_every=10),
        parallel=ParallelConfig(data=-1),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(every=100, num_batches=4),
    )
