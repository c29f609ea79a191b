"""The model that tests compare on meshes: as small as one with grouped queries can be cut."""

from jaxpar.config import Config, replace
from jaxpar.verification import small_config

#: Float32, two layers, four heads on two of keys and values; windows of 32 tokens, eight a batch.
#: Weights are large enough, and the rate high enough, for every gradient and update to count.
TINY = replace(
    small_config.float32(Config()),
    **{
        "model.num_layers": 2,
        "model.d_model": 16,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": 4,
        "model.d_ff": 24,
        "model.vocab_size": 48,
        "model.init_std": 0.2,
        "data.seq_len": 32,
        "train.global_batch_size": 8,
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 1e-2,
    },
)
