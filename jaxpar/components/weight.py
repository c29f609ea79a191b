"""`Weight`: the declaration of one array of a layer. All tables of weights are derived from it.

the stored array     shape, logical axes, initial values, decay          `parameters.layer_specs`
the fused layout     which arrays are concatenated, in the declared order  `fused_weights.fuse`
FSDP                 the sharded dimension, from the logical axes        `fused_weights.dims_of`
float8, gradient buffers, LoRA, µP, Muon     the fields below
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

type Init = Literal["normal", "ones", "zeros", "decay_rate", "time_step"]
type Inputs = Literal["shards", "own_tokens", "sequence"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One array of a layer. Made by `matrix`, `vector` or `conv_kernel`."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension, a name from `axes.RULES`."""
    init: Init = "normal"
    std: float | None = None
    """Standard deviation of the initial values. None: the model's init_std."""
    to_stream: bool = False
    """Whether it is a matrix that writes to the residual stream: its initial values are divided by
    sqrt(2 * num_layers), and tensor ranks sum its outputs."""
    columns: int = 0
    """Number of last dims that are a matrix's outputs. 0: no matrix for Muon, µP and matmuls."""
    decay: bool = True
    """Whether weight decay applies."""
    trainable: bool = True
    """False: no gradient. Something else than the optimizer changes it."""
    into: str = ""
    """Name of the fused array that it is a part of, after the weights declared before it."""
    into_optional: str = ""
    """The same, if `Execution.fused_gate_up`."""
    rank: int = 0
    """Number of dims of the fused array, if some are merged: 2 for matrices. 0: all of `shape`."""
    inputs: Inputs = "shards"
    """What a matrix multiplies. shards: the shards of the sequence that a tensor rank receives.
    own_tokens: this rank's own. sequence: the whole sequence at once."""
    float8: bool = True
    """Whether `compute.matmul_dtype` applies to a matrix."""
    converts_late: bool = False
    """Whether a gradient that needs no sum over devices is converted to float32 at the end of the
    backward, by whatever reads it. Of matrices that are most of a layer."""
    in_products: bool = True
    """`Term.uses_products` of its component."""
    adapter: str = ""
    """Name in `lora.targets`. Empty: no adapter."""
    readout: bool = False
    """Whether it maps the residual stream to a number of outputs that does not grow with the
    model (µP)."""

    @property
    def is_matrix(self) -> bool:
        """Whether `linear.products` multiplies by it, and so the step may round it."""
        return self.columns > 0 and self.in_products

    @property
    def num_inputs(self) -> int:
        """Inputs of a matrix: the product of all dims but the outputs."""
        return math.prod(self.shape[: -self.columns])

    @property
    def num_outputs(self) -> int:
        """Outputs of a matrix."""
        return math.prod(self.shape[-self.columns :])

    @property
    def of_experts(self) -> bool:
        """Whether each expert has its own."""
        return not {"experts", "spread_experts"}.isdisjoint(self.axes)


def matrix(shape: tuple[int, ...], axes: tuple[str, ...], **fields: Any) -> Weight:
    """Declare a matrix W of y = x W.

    Args:     shape, axes: of all its input dims, then all its output dims. fields: of `Weight`;
              columns is 1 unless it is said.
    """
    return Weight(shape=shape, axes=axes, **({"columns": 1, "rank": 2} | fields))


def vector(
    shape: tuple[int, ...], axes: tuple[str, ...], init: Init = "zeros", **fields: Any
) -> Weight:
    """Declare a bias, a gain or another array without weight decay."""
    return Weight(shape=shape, axes=axes, init=init, **({"decay": False} | fields))


def conv_kernel(shape: tuple[int, int, int], into: str) -> Weight:
    """Declare the kernel [heads, dims, W] of a short convolution over tokens, a channel each."""
    axes = ("heads", "head_dim", "head_dim")
    return Weight(shape=shape, axes=axes, std=shape[-1] ** -0.5, into=into, rank=2)


@dataclass(frozen=True)
class Fused:
    """One array of the fused layout."""

    name: str
    parts: tuple[tuple[str, Weight], ...]
    """The weights that it is made of, in order."""

    @property
    def first(self) -> Weight:
        """The first weight, whose fields are those of the array."""
        return self.parts[0][1]


def fused(weights: Mapping[str, Weight], *, gate_up: bool = False) -> dict[str, Fused]:
    """Return the arrays of the fused layout, in the order of their first weights.

    Args:     gate_up: `Execution.fused_gate_up`.
    """
    found: dict[str, list[tuple[str, Weight]]] = {}
    for name, weight in weights.items():
        optional = weight.into_optional if gate_up else ""
        found.setdefault(weight.into or optional or name, []).append((name, weight))
    return {name: Fused(name, tuple(parts)) for name, parts in found.items()}


def either_way(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the first weight of each array that the fused layout may have."""
    found: dict[str, Weight] = {}
    for name, weight in weights.items():
        for array in filter(None, (weight.into_optional, weight.into or name)):
            found.setdefault(array, weight)
    return found


def spread(weight: Weight) -> Weight:
    """Return the declaration of experts' arrays whose experts are spread over tensor ranks too."""
    if not weight.of_experts:
        return weight
    names = {"experts": "spread_experts", "mlp": "whole_mlp"}
    return dataclasses.replace(weight, axes=tuple(names.get(axis, axis) for axis in weight.axes))


# ------ Logical axes of weights, and the mesh axes that split them: `sharding/axes.py`, without JAX


_FSDP = ("data", "expert", "sequence")

#: Logical axis of a parameter dimension -> mesh axes it is split over.
RULES: dict[str, tuple[str, ...]] = {
    "layer": ("pipeline",),
    "embed": _FSDP,
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "whole_mlp": (),
    "experts": ("expert",),
    "spread_experts": ("expert", "tensor"),
    "expert_embed": ("data", "sequence"),
    "router": (),
    "every_expert": (),
    "vocab": ("tensor", "pipeline"),
    "head_dim": (),
    "latent": _FSDP,
    "depth": (),
    "norm": (),
    "rank": (),
    "replica": ("replica",),
}
