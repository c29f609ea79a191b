"""The tiny models of the tests: as small as can be cut, and alike, so that programs are shared."""

from jaxpar.certification import small_config
from jaxpar.config import Attention, Config, Experts, Glu, Layer, Model, replace
from jaxpar.config.fields import field_types
from jaxpar.config.listed import read_value
from jaxpar.config.schema.items import Remat

#: The parts of TINY's layers, which are named "layers".
ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=4)
GLU = Glu(24)

#: Four experts of which a token uses two, for "model.layers.feed_forward".
EXPERTS = Experts(expert=GLU, num_experts=4, experts_per_token=2)

#: What tests compare on meshes: float32, two layers, four heads on two of keys and values; windows
#: of 32 tokens, eight a batch. Weights are large enough, and the rate high enough, for every
#: gradient and update to count.
TINY = replace(
    small_config.float32(Config()),
    **{
        "model": Model(
            d_model=16,
            vocab_size=48,
            layers=[Layer("layers", ATTENTION, GLU)] * 2,
            init_std=0.2,
        ),
        "data.seq_len": 32,
        "train.global_batch_size": 8,
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 1e-2,
    },
)

_WIDE = Layer("layers", Attention(num_heads=4, num_kv_heads=2, head_dim=8), Glu(64))

#: Four layers, twice as wide, on one device: where memory, moments and stages are looked at.
SMALL = replace(
    small_config.float32(Config()),
    **{
        "model": Model(d_model=32, vocab_size=64, layers=[_WIDE] * 4),
        "data.seq_len": 32,
        "train.global_batch_size": 8,
        "parallel.data": 1,
    },
)

#: A model whose state is saved, compared or guarded: of four layers, for stages.
STATE = {
    "model": Model(d_model=16, vocab_size=32, layers=[Layer("layers", ATTENTION, GLU)] * 4),
}


def remat_of(text: str) -> Remat:
    """A value of parallel.remat, as on a command line."""
    return read_value(text, field_types()["parallel.remat"])
