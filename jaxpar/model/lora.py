"""Low-rank adapters (LoRA): two small trainable matrices next to each frozen matrix W.

    y = x W + factor * (x A) B         A [in, R], B [R, out], factor of `lora_targets.factor`

A is sharded like the input dims of W, and B like its output dims, over FSDP_AXES and TENSOR. R is
never sharded. So A of a column-parallel matrix and B of a row-parallel one are complete over
TENSOR. The adapter's output is added to the product with W before that is summed or scattered, so
adapters need no communication of activations. B starts at 0, so training starts from the base
model.

Source:   Hu et al. 2021 (2106.09685), section 4.1.
"""

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.model import Model
from jaxpar.components.weight import Weight
from jaxpar.config import LoraConfig
from jaxpar.config.lists.lora_targets import adapted
from jaxpar.sharding.params import ParamSpec, map_specs

type Tree = dict[str, Any]

#: Suffixes of the names of an adapter's two matrices.
A, B = "_lora_a", "_lora_b"


def dims_of(name: str, weight: Weight) -> dict[str, int | None]:
    """Return the FSDP-sharded dimension of an adapter's two matrices in the fused layout: the one
    of size D, or of a latent."""
    down, up = (None, -1) if weight.to_stream else (-2, None)
    return {name + A: down, name + B: up}


def with_adapters(specs: Tree, model: Model, lora: LoraConfig) -> Tree:
    """Add adapters to a model's specs. Only the adapters are trainable.

    A is initialized from a normal distribution with the variance of PEFT's uniform distribution,
    1 / (3 in), and B with 0.
    """
    specs = map_specs(lambda spec: dataclasses.replace(spec, trainable=False), specs)
    found = dict(specs)
    for stack, (layer, *_) in model.stacks.items():
        names = adapted(layer, model, lora.targets)
        pairs = (_pair(name, specs[stack][name], lora.rank) for name in names)
        found[stack] = functools.reduce(operator.or_, pairs, specs[stack])
    return found


def _pair(name: str, of: ParamSpec, rank: int) -> dict[str, ParamSpec]:
    """Return the specs of an adapter's two matrices, from the spec of the stacked base matrix."""
    cut = len(of.shape) - of.columns
    fan_in = math.prod(of.shape[1:cut])
    a = ParamSpec(
        shape=(*of.shape[:cut], rank),
        axes=(*of.axes[:cut], "rank"),
        std=1 / math.sqrt(3 * fan_in),
        columns=1,
        widths=(of.widths[0], 1.0),
        gradient=of.gradient,
    )
    b = ParamSpec(
        shape=(of.shape[0], rank, *of.shape[cut:]),
        axes=(of.axes[0], "rank", *of.axes[cut:]),
        init="zeros",
        columns=len(of.shape) - cut,
        widths=(1.0, of.widths[1]),
        gradient=of.gradient,
    )
    return {name + A: a, name + B: b}


def is_adapter(name: str) -> bool:
    """Return whether a parameter, or an array of the fused layout, belongs to an adapter."""
    return name.endswith((A, B))


def matrix_of(name: str) -> str:
    """Return the name of an adapter's base matrix. Other names are unchanged."""
    return name.removesuffix(A).removesuffix(B)


def fuse(w: Tree, lead: tuple[int, ...], factor: float) -> Tree:
    """Convert adapters to the fused layout: reshape them to matrices and scale B by the factor.

    Args:     w: the layers' parameters. lead: their leading dims.
    """
    out = {n: a.reshape(*lead, -1, a.shape[-1]) for n, a in w.items() if n.endswith(A)}
    b = {n: a.reshape(*lead, a.shape[len(lead)], -1) for n, a in w.items() if n.endswith(B)}
    return out | {n: factor * a for n, a in b.items()}


def add(y: jax.Array, x: Any, w: Tree, name: str) -> jax.Array:
    """Add an adapter's output to y, the product of x and a matrix. Without an adapter, return y.

    Args:     y: [..., out]. x: [..., in]; not read without an adapter. w: the layer's fused
              weights, complete over FSDP_AXES. name: parameter name of the matrix.
    """
    if name + A not in w:
        return y
    with jax.named_scope("adapters"):
        return y + (x @ w[name + A].astype(x.dtype)) @ w[name + B].astype(x.dtype)


def add_side_by_side(y: jax.Array, x: Any, w: Tree, names: tuple[str, ...]) -> jax.Array:
    """Add adapters to products of x with several matrices, which are side by side in y.

    Args:     names: of the matrices, in order. All or none have adapters. Others as `add`.
    """
    if names[0] + A not in w:
        return y
    ends = itertools.accumulate(w[name + B].shape[-1] for name in names[:-1])
    parts = zip(jnp.split(y, list(ends), axis=-1), names, strict=True)
    return jnp.concatenate([add(part, x, w, name) for part, name in parts], axis=-1)


def with_frozen_base(w: Tree) -> Tree:
    """Stop gradients at all weights of a layer except its adapters."""
    if not any(map(is_adapter, w)):
        return w
    return {n: a if is_adapter(n) else lax.stop_gradient(a) for n, a in w.items()}


def merge(params: Tree, factor: float) -> Tree:
    """Merge adapters into the base matrices: return parameters of an equivalent model.

    Args:     params: float32, with adapters: global arrays, or one device's shards of them.
    """
    return params | {n: _merged(w, factor) for n, w in params.items() if isinstance(w, dict)}


def _merged(blocks: Tree, factor: float) -> Tree:
    merged = {name: w for name, w in blocks.items() if not is_adapter(name)}
    for name in merged:
        if name + A in blocks:
            product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1, precision="highest"))
            merged[name] += factor * product(blocks[name + A], blocks[name + B])
    return merged
