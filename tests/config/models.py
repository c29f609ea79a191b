"""The config that tests of rules begin with, and layers of each kind in its place."""

from jaxpar.config import (
    Attention,
    Config,
    Experts,
    GatedDeltaNet,
    Glu,
    LatentAttention,
    Layer,
    Model,
    replace,
)

ATTENTION, GLU = Attention(num_heads=8, num_kv_heads=4, head_dim=32), Glu(704)
LAYER = Layer("layers", ATTENTION, GLU)

#: Four layers alike.
BASE = replace(Config(), model=Model(d_model=256, vocab_size=512, layers=[LAYER] * 4))

EXPERTS = Experts(expert=GLU, num_experts=4, experts_per_token=2)
OF_EXPERTS = Layer("layers", ATTENTION, EXPERTS)
DELTA = Layer(
    "delta_layers",
    GatedDeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=32),
    GLU,
)
LATENT = LatentAttention(
    num_heads=8, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=64
)
