"""Low-rank adapters (LoRA): two small trainable matrices next to each frozen matrix W.

    y = x W + factor * (x A) B         A [in, R], B [R, out], factor of `lora_targets.factor`

A lies as the input dims of W, B as its output dims: what of W is split over FSDP_AXES or TENSOR is
split in A or B alike, and R never. So A of a column-parallel matrix and B of a row-parallel one are
whole over TENSOR, and what they make is summed or scattered with the product that it is added to:
adapters send no activations. B starts at 0, and the model with it as it was.

Source:   Hu et al. 2021 (2106.09685), section 4.1.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import LoraConfig
from jaxpar.config.lora_targets import TARGETS
from jaxpar.sharding.params import ParamSpec, map_specs

type Tree = dict[str, Any]

#: After the name of a matrix: its adapter's two.
A, B = "_lora_a", "_lora_b"

#: Input dims of matrices that have more than one.
_INPUTS = {"wo": 2}

#: Matrices whose output has size D. The input of the others has.
_ROW_PARALLEL = ("wo", "w_down")

#: `fused_weights.LAYER_DIMS` of adapters: where D is.
FUSED_DIMS: dict[str, int | None] = {
    **{name + A: None if name in _ROW_PARALLEL else -2 for name in TARGETS.values()},
    **{name + B: -1 if name in _ROW_PARALLEL else None for name in TARGETS.values()},
}


def with_adapters(specs: Tree, lora: LoraConfig) -> Tree:
    """The specs of a model with adapters. Only the adapters are trainable.

    A starts normal, with the variance of PEFT's uniform distribution, 1 / (3 in); B at 0.
    """
    specs = map_specs(lambda spec: dataclasses.replace(spec, trainable=False), specs)
    blocks = dict(specs["layers"])
    for target in lora.targets.split(","):
        name = TARGETS[target]
        blocks |= _pair(name, blocks[name], lora.rank)
    return specs | {"layers": blocks}


def _pair(name: str, of: ParamSpec, rank: int) -> dict[str, ParamSpec]:
    """The two matrices of an adapter, for the stacked layers' spec of the matrix beside it."""
    cut = 1 + _INPUTS.get(name, 1)
    fan_in = math.prod(of.shape[1:cut])
    a = ParamSpec(
        shape=(*of.shape[:cut], rank),
        axes=(*of.axes[:cut], "rank"),
        std=1 / math.sqrt(3 * fan_in),
    )
    b = ParamSpec(
        shape=(of.shape[0], rank, *of.shape[cut:]),
        axes=("layer", "rank", *of.axes[cut:]),
        init="zeros",
    )
    return {name + A: a, name + B: b}


def is_adapter(name: str) -> bool:
    """Whether a parameter, or an array of the fused layout, belongs to an adapter."""
    return name.endswith((A, B))


def matrix_of(name: str) -> str:
    """The parameter that one of this name belongs to: of an adapter its matrix, else itself."""
    return name.removesuffix(A).removesuffix(B)


def fuse(w: Tree, lead: tuple[int, ...], factor: float) -> Tree:
    """Adapters in the fused layout: as matrices, with B times the factor.

    Args:     w: the layers' parameters. lead: their leading dims.
    """
    out = {n: a.reshape(*lead, -1, a.shape[-1]) for n, a in w.items() if n.endswith(A)}
    b = {n: a.reshape(*lead, a.shape[len(lead)], -1) for n, a in w.items() if n.endswith(B)}
    return out | {n: factor * a for n, a in b.items()}


def add(y: jax.Array, x: Any, w: Tree, name: str) -> jax.Array:
    """y, which is x times a matrix, with what its adapter adds; y itself where it has none.

    Args:     y: [..., out]. x: [..., in]; not read without an adapter. w: the layer's fused
              weights, whole over FSDP_AXES. name: of the matrix among the parameters.
    """
    if name + A not in w:
        return y
    with jax.named_scope("adapters"):
        return y + (x @ w[name + A].astype(x.dtype)) @ w[name + B].astype(x.dtype)


def with_frozen_base(w: Tree) -> Tree:
    """A layer's weights, with gradients stopped at all but its adapters."""
    if not any(map(is_adapter, w)):
        return w
    return {n: a if is_adapter(n) else lax.stop_gradient(a) for n, a in w.items()}


def merge(params: Tree, factor: float) -> Tree:
    """The parameters of the model without adapters that computes the same.

    Args:     params: float32, of `with_adapters`: whole arrays, or one device's shards of them.
    """
    blocks = params["layers"]
    merged = {name: w for name, w in blocks.items() if not is_adapter(name)}
    for name in merged:
        if name + A in blocks:
            product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1, precision="highest"))
            merged[name] += factor * product(blocks[name + A], blocks[name + B])
    return params | {"layers": merged}
