"""The tiny models of the tests: as small as can be cut, and alike, so that programs are shared."""

from jaxpar.config import Config, replace
from jaxpar.verification import small_config

#: What tests compare on meshes: float32, two layers, four heads on two of keys and values; windows
#: of 32 tokens, eight a batch. Weights are large enough, and the rate high enough, for every
#: gradient and update to count.
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

#: Four layers, twice as wide, on one device: where memory, moments and stages are looked at.
SMALL = replace(
    small_config.float32(Config()),
    **{
        "model.num_layers": 4,
        "model.d_model": 32,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": 8,
        "model.d_ff": 64,
        "model.vocab_size": 64,
        "data.seq_len": 32,
        "train.global_batch_size": 8,
        "parallel.data": 1,
    },
)

#: Fields of a model whose state is saved, compared or guarded: of four layers, for stages.
STATE = {
    "model.num_layers": 4,
    "model.d_model": 16,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 4,
    "model.d_ff": 24,
    "model.vocab_size": 32,
}
