"""Multi-token prediction (MTP): modules after the layers that predict the tokens after the next."""

import dataclasses
from typing import Any

from jaxpar.config import Model
from jaxpar.sharding.params import ParamSpec, on_every_stage

# Their parameters, and the names of these in the fused weight layout:
#
# A module has a layer like the model's last one, two norms, a projection and a last norm. The
# modules are stacked, as "mtp". In the fused layout, they are beside the arrays outside the layers,
# with flat names: "mtp0.wo" is an array of the first module.


type Tree = dict[str, Any]

#: FSDP-sharded dimension of the fused arrays of a module that its layer does not have.
DIMS: dict[str, int | None] = {
    "embed_norm": None,
    "hidden_norm": None,
    "w_join": -1,
    "out_norm": None,
}

#: Most modules that a model may have; published models have one.
MAX_DEPTH = 8


def specs(m: Model, layers: Tree) -> Tree:
    """Return the specs of the stacked modules.

    Args:     layers: the specs of `mtp_depth` stacked layers.
    """
    D, depth = m.d_model, m.mtp_depth
    gain = ParamSpec(shape=(depth, D), axes=("depth", "norm"), init="ones", decay=False)
    if m.norm.offset:
        gain = dataclasses.replace(gain, init="zeros")
    axes = ("depth", "rank", "rank", "embed")
    join = ParamSpec(shape=(depth, 2, D, D), axes=axes, std=m.init_std, columns=1)
    own = {"embed_norm": gain, "hidden_norm": gain, "w_join": join, "out_norm": gain}
    return on_every_stage(layers) | own


def prefix(k: int) -> str:
    """Return what the flat names of module k begin with."""
    return f"mtp{k}"
