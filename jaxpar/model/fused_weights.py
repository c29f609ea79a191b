"""The fused weight layout: a device's shards of the parameters, as matmuls read them.

Parameters are stored as one array per published matrix, with layers stacked. `fuse` concatenates
the query, key and value projections, concatenates gate and up if `Execution.fused_gate_up`, and
unstacks the layers. It is linear and local, so its transpose converts gradients back.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.model import Layer, Model
from jaxpar.components.weight import RULES, Fused, Weight, either_way, fused
from jaxpar.config import Config
from jaxpar.config.layout.layer_split import layers_before_stages
from jaxpar.config.lists.lora_targets import factor
from jaxpar.execution.decisions import Execution
from jaxpar.kernels.float8 import max_magnitude
from jaxpar.model import lora, mtp
from jaxpar.model.chunks import (
    BEFORE_STAGES,
    layer_outside,
    layers_of_chunk,
    map_layers,
    scan_period,
    with_layers,
)
from jaxpar.model.probes import is_extra
from jaxpar.parallel.fsdp import gather
from jaxpar.sharding.axes import COUNTS, DATA, FSDP_AXES
from jaxpar.sharding.params import of_prefix, with_prefix

type Tree = dict[str, Any]

#: FSDP-sharded dimension of each array outside the layers, counted from the end. None: not sharded.
TOP_DIMS: gather.Dims = {
    "embed": -1,
    "positions": -1,
    "final_norm": None,
    "final_norm_bias": None,
    "head": -2,
}

#: Name under which a tree of shards has the weights that ZeRO-2 gathered at the start of the step.
COMPLETE = "complete"

#: Name under which a layer's weights say whether the stage has this layer: a bool scalar, for the
#: last layers of a chunk if stages are unequal (`step/layer_order.py`).
IN_USE = "in_use"


def top_dims(top: Tree, m: Model) -> gather.Dims:
    """Return TOP_DIMS, and the dimensions of the arrays of layers outside the stages."""
    found = dict(TOP_DIMS)
    for prefix in dict.fromkeys(name.partition(".")[0] for name in top if "." in name):
        own = outside_dims(of_prefix(prefix, top), layer_outside(prefix, m), m)
        found |= with_prefix(prefix, own)
    return found


def dense_prefix(k: int) -> str:
    """Return what the flat names of the k-th layer before the stages begin with."""
    return f"{BEFORE_STAGES}{k}"


def outside_dims(w: Tree, layer: Layer, m: Model) -> gather.Dims:
    """Return the FSDP-sharded dimension of each fused array of a layer outside the stages: of a
    module (`mtp/`), or before the stages."""
    return {**layer_dims(w, layer, m), **mtp.DIMS}


def outside_layer(top: Tree, prefix: str) -> Tree:
    """Select a layer of the arrays outside the stages, with its complete weights if ZeRO-2.

    Args:     prefix: `mtp.prefix` or `dense_prefix`.
    """
    complete = of_prefix(prefix, top.get(COMPLETE, {}))
    return of_prefix(prefix, top) | ({COMPLETE: complete} if complete else {})


@functools.lru_cache(maxsize=1024)
def dims_of(layer: Layer, model: Model) -> gather.Dims:
    """Return the FSDP-sharded dimension of each array that a fused layer may have, its adapters
    included, counted from the end. None: not sharded."""
    declared = layer.weights(model)
    found = {name: sharded_dim(w) for name, w in either_way(declared).items()}
    for name, w in declared.items():
        if w.adapter:
            found |= lora.dims_of(name, w)
    return found


def sharded_dim(w: Weight) -> gather.Dim | None:
    """Return the dimension of a fused array that is split over FSDP_AXES, from the logical axes of
    its first weight: rows are -2, columns -1."""
    axes = tuple(itertools.dropwhile(COUNTS.__contains__, w.axes))
    for axis in axes:
        if DATA in RULES[axis]:
            dim = -1 if axis == axes[-1] else -2
            return dim if RULES[axis] == FSDP_AXES else gather.Split(dim, RULES[axis])
    return None


@functools.lru_cache(maxsize=1024)
def matrices_of(layer: Layer, model: Model) -> dict[str, Weight]:
    """Return the first weight of each matrix that a fused layer may have."""
    arrays = either_way(layer.weights(model))
    return {name: w for name, w in arrays.items() if w.is_matrix}


def layer_dims(w: Tree, layer: Layer, m: Model) -> gather.Dims:
    """Return `dims_of` a layer, and those of the extra arrays among its weights (`probes.py`)."""
    dims = dims_of(layer, m)
    extra = [name for name in w if is_extra(name)]
    return {**dims, **dict.fromkeys(extra)} if extra else dims


def fuse(params: Tree, ex: Execution) -> Tree:
    """Convert a device's shards to the fused layout, {"top": ..., "layers": ...}.

    One matmul then computes the query, key and value projections, and one computes gate and up if
    `Execution.fused_gate_up`. "layers" is a tuple of the device's v chunks: for `unroll`, each
    chunk is a tuple of one tree per layer; for `scan`, one tree of [layers, ...] arrays.

    Args:     params: all parameters, or the trainable or frozen ones of `params.split`.
    """
    cfg = ex.cfg
    stacks = {"mtp", *cfg.model.stacks}
    top = {name: w for name, w in params.items() if name not in stacks}
    if "embed" in top:
        top["head"] = top["head"] if "head" in top else top["embed"].T
    if modules := params.get("mtp"):
        for k, w in enumerate(_each_layer(modules, cfg.model.mtp_depth)):
            own, layer = _own_of_module(w), cfg.model.module_layer
            top |= with_prefix(mtp.prefix(k), own | _fuse_layer(w, layer, ex, stacked=False))
    before = layers_before_stages(cfg.model, cfg.parallel)
    leading = cfg.model.layers[:before]
    each = {
        name: iter(_each_layer(params[name], [layer.name for layer in leading].count(name)))
        for name in dict.fromkeys(layer.name for layer in leading)
        if params.get(name)
    }
    for k, layer in enumerate(leading):
        if layer.name in each:
            of_layer = _fuse_layer(next(each[layer.name]), layer, ex, stacked=False)
            top |= with_prefix(dense_prefix(k), of_layer)
    scan = cfg.parallel.layer_loop == "scan"
    chunks = _chunks(params, cfg)

    def in_layer(layer: Layer, w: Tree) -> Tree:
        return _fuse_layer(w, layer, ex, stacked=scan)

    return {"top": top, "layers": with_layers(in_layer, cfg, chunks)}


def _chunks(params: Tree, cfg: Config) -> tuple[Any, ...]:
    """Put the layers of each name in the model's order: v chunks, not yet fused.

    Names without arrays, of the frozen or the trainable ones alone, have layers without any.
    """
    p, layers = cfg.parallel, layers_of_chunk(cfg)
    scan, period = p.layer_loop == "scan", layers[: scan_period(layers)]
    if scan and len(period) == 1:
        return _split_layers(params[layers[0].name], p.virtual_stages)
    places = period if scan else layers
    names = [layer.name for layer in places]
    of_names: dict[str, Iterator[tuple[Tree, ...]]] = {}
    for name in dict.fromkeys(names):
        stack, count = params.get(name), names.count(name)
        if not stack:
            of_names[name] = itertools.repeat(({},) * count)
        elif scan:
            split = _split_layers(stack, p.virtual_stages)
            of_names[name] = iter([_of_period(w, count) for w in split])
        else:
            # A single pass that concatenates 32 layers reached a tenth of the bandwidth.
            of_names[name] = iter(_unstack(stack, p.virtual_stages))
    chunks = []
    for _ in range(p.virtual_stages):
        left = {name: iter(next(of_name)) for name, of_name in of_names.items()}
        ordered = [next(left[name]) for name in names]
        chunks.append(ordered if scan else tuple(ordered))
    return tuple(chunks)


def _of_period(stacked: Tree, n: int) -> tuple[Tree, ...]:
    """Split stacked layers into those at each of n places of a period, stacked over periods."""
    by_period = {name: a.reshape(-1, n, *a.shape[1:]) for name, a in stacked.items()}
    return tuple({name: a[:, i] for name, a in by_period.items()} for i in range(n))


def _fuse_layer(w: Tree, layer: Layer, ex: Execution, *, stacked: bool) -> Tree:
    """Convert one layer's arrays, or stacked ones, to the fused layout.

    Args:     w: all arrays of the layer; or the trainable or the frozen ones, perhaps none.
    """
    if not w:
        return {}
    cfg = ex.cfg
    lead = next(iter(w.values())).shape[:stacked]
    out = lora.fuse(w, lead, factor(cfg.lora)) if cfg.lora else {}
    declared = layer.weights(cfg.model)
    arrays = fused(declared, gate_up=ex.fused_gate_up)
    arrays = {name: array for name, array in arrays.items() if array.parts[0][0] in w}
    # First those that are as they are stored.
    for name in sorted(arrays, key=lambda name: not _is_stored(arrays[name])):
        parts = [_merged(w[n], weight, len(lead)) for n, weight in arrays[name].parts]
        axis = -2 if _is_kernel(arrays[name].first) else -1
        out[name] = jnp.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0]
    return out


def _is_stored(array: Fused) -> bool:
    """Return whether an array is a single weight, with the dims in which it is stored."""
    w, counts = array.first, sum(axis in COUNTS for axis in array.first.axes)
    return len(array.parts) == 1 and (not w.rank or w.rank == len(w.shape) - counts)


def _is_kernel(w: Weight) -> bool:
    """Return whether an array is a convolution's kernel, whose last dim counts tokens."""
    return w.rank == 2 and not w.columns


def _merged(a: jax.Array, w: Weight, lead: int) -> jax.Array:
    """Return an array with as many dims as `Weight.rank` says: its inputs and its outputs."""
    if not w.rank:
        return a
    before = lead + sum(axis in COUNTS for axis in w.axes)
    columns = 1 if _is_kernel(w) else w.columns
    cut = before if w.rank == 1 else a.ndim - columns
    rows, outputs = math.prod(a.shape[before:cut]), math.prod(a.shape[cut:])
    shape = (outputs,) if w.rank == 1 else (rows, outputs)
    return a.reshape(*a.shape[:before], *shape)


def _own_of_module(w: Tree) -> Tree:
    """Convert the arrays that a module for multi-token prediction has beside those of its layer."""
    own = {n: w[n] for n in mtp.DIMS if n in w}
    if "w_join" in own:
        own["w_join"] = own["w_join"].reshape(-1, own["w_join"].shape[-1])
    return own


def _split_layers(stacked: Tree, n: int) -> tuple[Tree, ...]:
    """Split stacked layers into n groups by `lax.split`, whose transpose concatenates once."""
    size = next(iter(stacked.values())).shape[0] // n
    groups = {name: lax.split(a, [size] * n) for name, a in stacked.items()}
    return tuple({name: group[i] for name, group in groups.items()} for i in range(n))


def _unstack(stacked: Tree, v: int) -> tuple[tuple[Tree, ...], ...]:
    """Convert stacked layers to v chunks of one tree per layer."""
    n = next(iter(stacked.values())).shape[0]
    return tuple(itertools.batched(_each_layer(stacked, n), n // v))


def _each_layer(stacked: Tree, n: int) -> tuple[Tree, ...]:
    """Convert n stacked layers to one tree per layer."""
    return tuple({name: a.squeeze(0) for name, a in w.items()} for w in _split_layers(stacked, n))


def unstack_layers(tree: Tree, cfg: Config) -> Tree:
    """Unstack the layers of a tree like the parameters, if layers are unrolled.

    Code that reads the tree layer by layer then reads each layer's arrays directly, and XLA needs
    no kernel that stacks them first.
    """
    if cfg.parallel.layer_loop == "scan":
        return tree
    stacks = ["layers"] if "layers" in tree else cfg.model.stacks
    found = dict(tree)
    for name in (name for name in stacks if name in tree):
        found[name] = _split_layers(tree[name], next(iter(tree[name].values())).shape[0])
    return found


def with_scales(weights: Tree, shards: Tree, cfg: Config) -> Tree:
    """In float8, add the scales of each layer's matrices to the weights of a step.

    Args:     weights: `shards` (ZeRO-3) or gathered weights (ZeRO-1, 2).
              shards: this device's, fused.
    Communication: `fsdp.float8_scales`: one all-reduce for all layers.
    """
    one = jax.tree.leaves(shards["layers"], is_leaf=lambda tree: isinstance(tree, dict))[0]
    if cfg.compute.matmul_dtype == "compute" or all(map(lora.is_adapter, one)):
        return weights
    model = cfg.model

    @jax.named_scope("float8_scales")
    def largest(layer: Layer, w: Tree) -> Tree:
        """All experts of a layer share a scale, so that each is rounded the same on every mesh."""
        matrices = {n: of for n, of in matrices_of(layer, model).items() if of.float8 and n in w}
        dims = {n: (-3, -2, -1) if of.of_experts else (-2, -1) for n, of in matrices.items()}
        return {n: max_magnitude(w[n].astype(cfg.compute.dtype), d) for n, d in dims.items()}

    scales = gather.float8_scales(with_layers(largest, cfg, shards["layers"]))

    def add_scales(layer: Layer, w: Tree, scales: Tree) -> Tree:
        return w | {"scales": _with_common_scale(matrices_of(layer, model), scales)}

    return weights | {"layers": with_layers(add_scales, cfg, weights["layers"], scales)}


def _with_common_scale(matrices: dict[str, Weight], scales: Tree) -> Tree:
    """Give the matrices of experts' inputs the smallest scale: a product sums over both."""
    into = [n for n, w in matrices.items() if w.of_experts and not w.to_stream and n in scales]
    if len(into) < 2:
        return scales
    return scales | dict.fromkeys(into, functools.reduce(jnp.minimum, (scales[n] for n in into)))


def to_shards(weights: Tree, shards: Tree, cfg: Config) -> tuple[Tree, Tree]:
    """Separate gathered weights from the shards that receive their gradients (ZeRO-2).

    Args:     weights: of a step, gathered, perhaps with scales. shards: this device's, fused.
    Returns:  (`shards`, with scales if `weights` has them; a tree of the same structure with the
              gathered weights under `COMPLETE`), for `params.join`.
    """

    def trainable(w: Tree, shards: Tree) -> Tree:
        return shards | {n: w[n] for n in w if n == "scales"}

    def complete(w: Tree, shards: Tree, dims: gather.Dims) -> Tree:
        return {COMPLETE: {n: w[n] for n in shards if dims[n] is not None}}

    def of_layer(layer: Layer, w: Tree, shards: Tree) -> Tree:
        return complete(w, shards, layer_dims(shards, layer, cfg.model))

    own = map_layers(trainable, weights["layers"], shards["layers"])
    whole = with_layers(of_layer, cfg, weights["layers"], shards["layers"])
    top = complete(weights["top"], shards["top"], top_dims(shards["top"], cfg.model))
    return {"top": shards["top"], "layers": own}, {"top": top, "layers": whole}


def only(top: Tree, name: str) -> Tree:
    """Select one of the arrays outside the layers, with its complete weight if ZeRO-2."""
    complete = {COMPLETE: {name: top[COMPLETE][name]}} if name in top.get(COMPLETE, {}) else {}
    return {name: top[name]} | complete


def without_scales(grads: Tree) -> Tree:
    """Remove the scales' entries from gradients of a tree from `with_scales`."""
    drop = lambda w: {n: g for n, g in w.items() if n != "scales"}  # noqa: E731
    return grads | {"layers": map_layers(drop, grads["layers"])}
