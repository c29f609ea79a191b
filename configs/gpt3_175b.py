"""GPT-3 175B on 512 GPUs, or 64 times any power of two: python -m jaxpar.train gpt3_175b

Shape and schedule: GPT-3 (2005.14165), table 2.1 and appendix B, with dense attention in every
layer, and a vocabulary padded from 50,257 as in Megatron-LM. Never run at full size.
"""

from jaxpar.config import (
    Attention,
    Config,
    DataConfig,
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
        num_heads=96, num_kv_heads=96, head_dim=128, rope=None, bias=True, out_bias=True
    )
    layer = Layer("layers", attention, Mlp(49_152, activation="gelu", bias=True))
    model = Model(
        d_model=12_288,
        vocab_size=51_200,
        layers=[layer] * 96,
        tie_embeddings=True,
        norm=Norm(kind="layer"),
        max_positions=2048,
    )
    return Config(
        run=RunConfig(dir="runs/gpt3_175b"),
        model=model,
        data=DataConfig(seq_len=2048),
        train=TrainConfig(num_steps=95_000, global_batch_size=1536),
        parallel=ParallelConfig(
            data=-1,
            pipeline=8,
            tensor=8,
            num_microbatches=96,
            zero=1,
            remat="attn_out",
            layer_loop="unroll",
        ),
        optimizer=OptimizerConfig(learning_rate=0.6e-4, warmup_steps=120, decay_steps=82_500),
    )
