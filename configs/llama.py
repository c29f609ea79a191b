"""A Llama of any size: python -m jaxpar.train llama --params 350M --tokens 7B

Everything else follows from the two by published rules:

- layers: of the GPT-3 model nearest in size (Brown et al. 2020, table 2.1); the width makes up the
  parameters, with SwiGLU and a key-value head for four query heads, as in Llama 3;
- tokens: 20 for each parameter (Hoffmann et al. 2022), if they are not given;
- peak learning rate 1.79 N^-0.713 D^0.307, tokens of a batch 0.58 D^0.571, decay to 1e-5 after
  at most 2,000 steps of warm-up, for N parameters and D tokens (Step Law, Li et al. 2025).

`--print-config` shows the result; `python -m jaxpar.plan llama --params 350M --gpus 8 --write FILE`
writes it for GPUs. The vocabulary is that of the data.
"""

import math
from typing import Annotated

from jaxpar.config import (
    Attention,
    Config,
    ConfigError,
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
from jaxpar.config.numerals import with_unit

#: Layers of GPT-3's models by their parameters.
LAYERS = {125e6: 12, 350e6: 24, 760e6: 24, 1.3e9: 24, 2.7e9: 32, 6.7e9: 32, 13e9: 40, 175e9: 96}

SEQ_LEN = 2048


def get_config(
    params: Annotated[float, "Parameters without embeddings and head, such as 350M."] = 125e6,
    tokens: Annotated[float, "Tokens of the whole run. 0: 20 for each parameter."] = 0.0,
) -> Config:
    if not 5e6 <= params <= 1e12:
        raise ConfigError("--params", params, "must be from 5M to 1T", "use --params 125M")
    if not 0 <= tokens <= 1e15:
        raise ConfigError("--tokens", tokens, "must be from 0 to 1000T", "use --tokens 7B")
    tokens = tokens or 20 * params
    batch = max(1, round(0.58 * tokens**0.571 / SEQ_LEN / 8)) * 8
    steps = math.ceil(tokens / (batch * SEQ_LEN))
    if steps < 10:
        rule = f"must be at least 10 steps of {batch * SEQ_LEN:,} tokens"
        raise ConfigError("--tokens", tokens, rule, "use --tokens 100M")
    learning_rate = 1.79 * params**-0.713 * tokens**0.307
    model = model_of(params)
    return Config(
        run=RunConfig(dir=f"runs/llama_{with_unit(params)}"),
        model=model,
        data=DataConfig(seq_len=SEQ_LEN),
        train=TrainConfig(num_steps=steps, global_batch_size=batch),
        parallel=ParallelConfig(data=-1, remat="none", layer_loop="unroll"),
        optimizer=OptimizerConfig(
            learning_rate=float(f"{learning_rate:.3g}"),
            min_lr_ratio=min(1.0, float(f"{1e-5 / learning_rate:.3g}")),
            warmup_steps=min(2000, steps // 10),
        ),
        evaluation=EvaluationConfig(every=max(1, steps // 20)),
    )


def model_of(params: float) -> Model:
    """Return a model whose layers have about `params` parameters."""
    num_layers = LAYERS[min(LAYERS, key=lambda size: abs(math.log(size / params)))]
    per_layer = params / num_layers
    # Queries and output take d_model^2 each, keys and values half of it, the SwiGLU 8 d_model^2.
    width = math.sqrt(per_layer / 10.5)
    head_dim = 128 if width >= 1536 else 64
    num_heads = 4 * max(1, round(width / head_dim / 4))
    d_model = num_heads * head_dim
    d_ff = head_dim * round((per_layer - 2.5 * d_model**2) / (3 * d_model) / head_dim)
    attention = Attention(num_heads=num_heads, num_kv_heads=num_heads // 4, head_dim=head_dim)
    return Model(
        d_model=d_model,
        vocab_size=0,
        layers=[Layer("layers", attention, Glu(d_ff))] * num_layers,
        tie_embeddings=params < 1e9,
    )
