"""Parameters as a device computes with them: its shards, arranged.

Parameters are stored one array per published matrix, layers stacked. `view` puts query, key and
value side by side, and gate and up where `Execution.fused_gate_up`, and cuts the layers apart; it
is linear and local, so its transpose carries gradients back.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.config.lora_targets import factor
from jaxpar.execution.decisions import Execution
from jaxpar.model import lora
from jaxpar.parallel.fsdp import gather

type Tree = dict[str, Any]

#: Dimension, from the end, over which each array of a layer's view is FSDP-sharded; None: whole.
LAYER_DIMS: dict[str, int | None] = {
    "attn_norm": None,
    "attn_post_norm": None,
    "wqkv": -2,
    "bqkv": None,
    "q_norm": None,
    "k_norm": None,
    "wo": -1,
    "bo": None,
    "mlp_norm": None,
    "mlp_post_norm": None,
    "router": -2,
    "w_gate_up": -2,
    "w_gate": -2,
    "b_gate": None,
    "w_up": -2,
    "b_up": None,
    "w_down": -1,
    "b_down": None,
}

#: The matrices of a layer, which `model.matmul_dtype` is about, with their entries.
PROJECTIONS = {n: dim for n, dim in LAYER_DIMS.items() if dim is not None and n != "router"}

LAYER_DIMS |= lora.FUSED_DIMS

#: As LAYER_DIMS, for the arrays outside the layers.
TOP_DIMS: dict[str, int | None] = {"embed": -1, "final_norm": None, "head": -2}


def view(params: Tree, ex: Execution) -> Tree:
    """A device's shards, arranged for computing: {"top": ..., "layers": ...}.

    Query, key and value projections lie side by side, so that one matmul serves them; gate and up
    where `Execution.fused_gate_up`.
    Layers are a tuple of the device's v chunks, each a tuple of one tree per layer for `unroll`,
    one tree of [layers, ...] arrays for `scan`.

    Args:     params: all of them, or one of the parts that `params.split` makes with adapters.
    """
    top = {name: w for name, w in params.items() if name != "layers"}
    if "embed" in top:
        top["head"] = top["head"] if "head" in top else top["embed"].T
    cfg = ex.cfg
    stacked, v = params["layers"], cfg.parallel.virtual_stages
    # Cut first: one pass that puts 32 layers side by side ran at a tenth of the bandwidth.
    chunks = _cut(stacked, v) if cfg.parallel.layer_loop == "scan" else _apart(stacked, v)
    return {"top": top, "layers": each_tree(functools.partial(_arranged, ex=ex), chunks)}


def _arranged(w: Tree, ex: Execution) -> Tree:
    """A layer's arrays, or stacked ones, as the step multiplies by them."""
    cfg = ex.cfg
    stacked = cfg.parallel.layer_loop == "scan"
    lead = next(iter(w.values())).shape[:stacked]
    adapters = lora.fuse(w, lead, factor(cfg)) if cfg.lora.rank else {}
    return adapters | (_side_by_side(w, lead, ex) if "attn_norm" in w else {})


def _side_by_side(w: Tree, lead: tuple[int, ...], ex: Execution) -> Tree:
    """The matrices, but for adapters; leading (layer) dims pass through."""
    flat = lambda name, *dims: w[name].reshape(*lead, *dims)  # noqa: E731
    D = w["wq"].shape[-3]
    out = {n: w[n] for n in LAYER_DIMS if n in w and not lora.is_adapter(n)}
    out["wqkv"] = jnp.concatenate([flat(n, D, -1) for n in ("wq", "wk", "wv")], axis=-1)
    out["wo"] = flat("wo", -1, w["wo"].shape[-1])
    if ex.fused_gate_up:
        out["w_gate_up"] = jnp.concatenate([out.pop("w_gate"), out.pop("w_up")], axis=-1)
    if "bq" in w:
        out["bqkv"] = jnp.concatenate([flat(n, -1) for n in ("bq", "bk", "bv")], axis=-1)
    return out


def _cut(stacked: Tree, pieces: int) -> tuple[Tree, ...]:
    """Stacked layers in equal pieces. `lax.split`, because its transpose is one concatenation."""
    n = next(iter(stacked.values())).shape[0] // pieces
    cut = {name: lax.split(a, [n] * pieces) for name, a in stacked.items()}
    return tuple({name: p[i] for name, p in cut.items()} for i in range(pieces))


def _apart(stacked: Tree, v: int) -> tuple[tuple[Tree, ...], ...]:
    """Stacked layers as v chunks of one tree per layer."""
    n = next(iter(stacked.values())).shape[0]
    each = [{name: a.squeeze(0) for name, a in w.items()} for w in _cut(stacked, n)]
    return tuple(itertools.batched(each, n // v))


def apart(tree: Tree, cfg: Config) -> Tree:
    """A tree like the parameters', the layers cut apart where they are unrolled: what reads it in
    pieces reads each where it was made, not all of them through one kernel that puts them in a
    stack."""
    layers = tree["layers"]
    if cfg.parallel.layer_loop == "scan":
        return tree
    return tree | {"layers": _cut(layers, next(iter(layers.values())).shape[0])}


def each_tree(fn: Callable[..., Any], layers: tuple, *rest: tuple) -> tuple:
    """`fn` of every tree in the layers of a `view`, and of those at its place in the rest."""

    def in_chunk(chunk: Any, *others: Any) -> Any:
        apart = isinstance(chunk, tuple)
        return tuple(map(fn, chunk, *others)) if apart else fn(chunk, *others)

    return tuple(map(in_chunk, layers, *rest))


def with_scales(weights: Tree, shards: Tree, cfg: Config) -> Tree:
    """The weights of a step, and in float8 the scale of each layer's matrices beside them.

    Args:     weights: `shards` (ZeRO-3) or whole (ZeRO-1). shards: the view of this device's.
    Communication: that of `fsdp.float8_scales`: one all-reduce for all layers, and none later.
    """
    one = jax.tree.leaves(shards["layers"], is_leaf=lambda tree: isinstance(tree, dict))[0]
    if cfg.model.matmul_dtype == "compute" or all(map(lora.is_adapter, one)):
        return weights
    names = tuple(n for n in PROJECTIONS if n in one)
    scales = gather.float8_scales(shards["layers"], names, cfg.model.dtype)
    beside = lambda w, s: w | {"scales": s}  # noqa: E731
    return weights | {"layers": each_tree(beside, weights["layers"], scales)}


def without_scales(grads: Tree) -> Tree:
    """Gradients of a tree from `with_scales`, for the arrays of the view alone."""
    drop = lambda w: {n: g for n, g in w.items() if n != "scales"}  # noqa: E731
    return grads | {"layers": each_tree(drop, grads["layers"])}
