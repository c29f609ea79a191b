"""GPT-2 124M on one GPU: python -m jaxpar.train gpt2_124m

Shape: the smallest model of GPT-2 (Radford et al. 2019), with a vocabulary padded from 50,257.
Schedule: GPT-3 Small (2005.14165, table 2.1): 0.5M tokens per step and a peak of 6e-4; here 10B
tokens. docs/recipes/gpt2_124m.md has the data.
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
    EvaluationConfig,
    Layer,
    Mlp,
    Model,
    Norm,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    attention = Attention(
        num_heads=12, num_kv_heads=12, head_dim=64, rope=None, bias=True, out_bias=True
    )
    layer = Layer("layers", attention, Mlp(3072, activation="gelu", bias=True))
    model = Model(
        d_model=768,
        vocab_size=50_304,
        layers=[layer] * 12,
        tie_embeddings=True,
        norm=Norm(kind="layer"),
        max_positions=1024,
    )
    return Config(
        run=RunConfig(dir="runs/gpt2_124m"),
        model=model,
        data=DataConfig(seq_len=1024),
        train=TrainConfig(num_steps=19_000, global_batch_size=512),
        parallel=ParallelConfig(data=-1, num_microbatches=8, remat="none", layer_loop="unroll"),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=700),
        evaluation=EvaluationConfig(every=500, num_batches=16),
    )
