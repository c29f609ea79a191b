"""The config that tests of rules begin with, and layers of each kind in its place."""

from typing import Any

from jaxpar.config import (
    Attention,
    Config,
    Experts,
    GatedDeltaNet,
    Glu,
    LatentAttention,
    Layer,
    Model,
    default_of,
    replace,
)
from jaxpar.config.fields import is_required, leaf_paths

ATTENTION, GLU = Attention(num_heads=8, num_kv_heads=4, head_dim=32), Glu(704)
LAYER = Layer("layers", ATTENTION, GLU)


def setting(path: str, value: Any) -> dict[str, Any]:
    """A field with a value, and what its section needs beside it if it is None by default."""
    beside = [p for p in leaf_paths() if p.rpartition(".")[0] == path.rpartition(".")[0]]
    return {p: default_of(p) for p in beside if is_required(p)} | {path: value}


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
