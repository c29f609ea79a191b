"""The config that tests of rules begin with, and layers of each kind in its place."""

from types import NoneType
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
from jaxpar.config.listed import has_fields, hints_of, item_of, members

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


def lists_of(item: Any) -> list[tuple]:
    """Lists of up to three items: good, out of range, twice, or out of order."""
    usual = {int: [0, 1, 8, -1], float: [1.0, 0.5, 0.0, -1.0], str: ["a", "b", "", "full"]}
    usual |= {NoneType: [None]}

    def some(hint: Any, n: int) -> Any:
        if (inner := item_of(hint)) is not None:
            return tuple(some(inner, n + i) for i in range(n % 3 + 1))
        if has_fields(hint):
            return hint(*(some(of, n + i) for i, of in enumerate(hints_of(hint).values())))
        found = [
            v for one in members(hint) for v in ([one] if isinstance(one, str) else usual[one])
        ]
        return found[n % len(found)]

    return [
        tuple(some(item, n) for n in of) for of in ((0,), (1,), (0, 1), (1, 0), (2, 2), (0, 3, 2))
    ]
