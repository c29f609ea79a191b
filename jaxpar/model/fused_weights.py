"""The fused weight layout: a device's shards of the parameters, as matmuls read them.

Parameters are stored as one array per published matrix, with layers stacked. `fuse` concatenates
the query, key and value projections, concatenates gate and up if `Execution.fused_gate_up`, and
unstacks the layers. It is linear and local, so its transpose converts gradients back.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.config.layout.layer_kinds import STACKS, dense_places
from jaxpar.config.layout.layer_split import dense_before_stages
from jaxpar.config.lists.lora_targets import factor
from jaxpar.execution.decisions import Execution
from jaxpar.model import lora
from jaxpar.model.mtp import parameters as mtp
from jaxpar.model.probes import is_extra
from jaxpar.model.recurrent import parameters as recurrent
from jaxpar.parallel.fsdp import gather
from jaxpar.sharding.axes import EXPERT_FSDP_AXES
from jaxpar.sharding.params import of_prefix, with_prefix

type Tree = dict[str, Any]

#: FSDP-sharded dimension of each fused array of a layer, counted from the end. None: not sharded.
LAYER_DIMS: dict[str, int | None] = {
    "attn_norm": None,
    "attn_norm_bias": None,
    "attn_post_norm": None,
    "wqkv": -2,
    "wqk": -2,
    "wq": -2,
    "wq_a": -2,
    "q_a_norm": None,
    "wq_b": -2,
    "wkv_a": -2,
    "kv_a_norm": None,
    "wkv_b": -2,
    "bqkv": None,
    "q_norm": None,
    "k_norm": None,
    "sinks": None,
    "w_attn_gate": -2,
    "wo": -1,
    "bo": None,
    "mlp_norm": None,
    "mlp_norm_bias": None,
    "mlp_post_norm": None,
    "router": -2,
    "b_router": None,
    "router_bias": None,
    "w_shared_gate": -2,
    "w_shared_up": -2,
    "w_shared_down": -1,
    "w_shared_router": None,
    "w_gate_up": -2,
    "w_gate": -2,
    "b_gate": None,
    "w_up": -2,
    "b_up": None,
    "w_down": -1,
    "b_down": None,
    "layer_scale": None,
    **recurrent.FUSED_DIMS,
}

#: The matrices of a layer but for the router, with their entries of LAYER_DIMS.
PROJECTIONS = {n: dim for n, dim in LAYER_DIMS.items() if dim is not None and n != "router"}

#: Those that `model.matmul_dtype` applies to.
IN_FLOAT8 = tuple(name for name in PROJECTIONS if name not in recurrent.IN_COMPUTE_DTYPE)

LAYER_DIMS |= lora.FUSED_DIMS

#: The matrices of experts, and those of a dense layer that is split in the same way.
OF_EXPERTS = ("w_gate", "w_up", "w_down")

#: The same for a layer with experts: other devices have other experts.
EXPERT_DIMS: gather.Dims = {
    **LAYER_DIMS,
    "w_gate": gather.Split(-2, EXPERT_FSDP_AXES),
    "w_up": gather.Split(-2, EXPERT_FSDP_AXES),
    "w_down": gather.Split(-1, EXPERT_FSDP_AXES),
}

#: The same as LAYER_DIMS, for the arrays outside the layers.
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


def top_dims(top: Tree) -> gather.Dims:
    """Return TOP_DIMS, and the dimensions of the arrays of layers outside the stages."""
    found = dict(TOP_DIMS)
    for prefix in dict.fromkeys(name.partition(".")[0] for name in top if "." in name):
        found |= with_prefix(prefix, outside_dims(of_prefix(prefix, top)))
    return found


def dense_prefix(k: int) -> str:
    """Return what the flat names of the k-th layer before the stages begin with."""
    return f"dense{k}"


def outside_dims(w: Tree) -> gather.Dims:
    """Return the FSDP-sharded dimension of each fused array of a layer outside the stages: of a
    module (`mtp/`), or before the stages."""
    return {**layer_dims(w), **mtp.DIMS}


def outside_layer(top: Tree, prefix: str) -> Tree:
    """Select a layer of the arrays outside the stages, with its complete weights if ZeRO-2.

    Args:     prefix: `mtp.prefix` or `dense_prefix`.
    """
    complete = of_prefix(prefix, top.get(COMPLETE, {}))
    return of_prefix(prefix, top) | ({COMPLETE: complete} if complete else {})


def layer_dims(w: Tree) -> gather.Dims:
    """Return the FSDP-sharded dimension of each fused array of a layer with these weights."""
    dims = EXPERT_DIMS if "router" in w else LAYER_DIMS
    extra = [name for name in w if is_extra(name)]
    return {**dims, **dict.fromkeys(extra)} if extra else dims


def fuse(params: Tree, ex: Execution) -> Tree:
    """Convert a device's shards to the fused layout, {"top": ..., "layers": ...}.

    One matmul then computes the query, key and value projections, and one computes gate and up if
    `Execution.fused_gate_up`. "layers" is a tuple of the device's v chunks: for `unroll`, each
    chunk is a tuple of one tree per layer; for `scan`, one tree of [layers, ...] arrays.

    Args:     params: all parameters, or the trainable or frozen ones of `params.split`.
    """
    stacks = {"dense_layers", "mtp", *STACKS.values()}
    top = {name: w for name, w in params.items() if name not in stacks}
    if "embed" in top:
        top["head"] = top["head"] if "head" in top else top["embed"].T
    cfg = ex.cfg
    if modules := params.get("mtp"):
        for k, w in enumerate(_each_layer(modules, cfg.model.mtp_depth)):
            top |= with_prefix(mtp.prefix(k), _fuse_module(w, ex))
    before = dense_before_stages(cfg.model, cfg.parallel)
    if before and "dense_layers" in params:
        for k, w in enumerate(_each_layer(params["dense_layers"], before)):
            top |= with_prefix(dense_prefix(k), _fuse_layer(w, ex, stacked=False))
    v, scan = cfg.parallel.virtual_stages, cfg.parallel.layer_loop == "scan"
    # Unstack first: a single pass that concatenates 32 layers reached a tenth of the bandwidth.
    split = _split_layers if scan else _unstack
    chunks: tuple[Any, ...]
    if pattern := cfg.model.layer_pattern:
        periods = cfg.model.num_layers // (len(pattern) * cfg.parallel.pipeline * v)
        by_kind = {
            kind: split(params[STACKS[kind]], v)
            if params.get(STACKS[kind])
            else _nothing(periods * pattern.count(kind), v, scan=scan)
            for kind in sorted(set(pattern))
        }
        chunks = _in_order(by_kind, pattern, v, scan=scan)
    else:
        chunks = split(params["layers"], v)
    if dense := cfg.model.dense_layers - before:  # unrolled layers, in a single chunk
        stack = params.get("dense_layers")
        of_dense = _each_layer(stack, dense) if stack else ({},) * dense
        chunks = (_placed(of_dense, tuple(chunks[0]), dense_places(cfg.model)),)
    of_layer = functools.partial(_fuse_layer, ex=ex, stacked=scan)
    return {"top": top, "layers": map_layers(of_layer, chunks)}


def _nothing(n: int, v: int, *, scan: bool) -> tuple:
    """Return v chunks of n layers without arrays."""
    return (({},) * n if not scan else {},) * v


def _placed(dense: tuple, others: tuple, places: tuple[int, ...]) -> tuple[Tree, ...]:
    """Put dense layers at their places among the others."""
    left, rest = iter(dense), iter(others)
    return tuple(next(left if i in places else rest) for i in range(len(dense) + len(others)))


def _in_order(
    chunks: dict[str, tuple], pattern: str, v: int, *, scan: bool
) -> tuple[tuple[Tree, ...] | list[Tree], ...]:
    """Put layers of several kinds in the model's order.

    Args:     chunks: of each kind, v chunks as of a model with only these layers.
    Returns:  v chunks. For `scan`, a list of one period's layers, each stacked over periods.
    """
    if scan:
        chunks = {
            kind: tuple(_of_period(w, pattern.count(kind)) for w in of_kind)
            for kind, of_kind in chunks.items()
        }
    ordered = []
    for i in range(v):
        left = {kind: iter(of_kind[i]) for kind, of_kind in chunks.items()}
        count = sum(len(of_kind[i]) for of_kind in chunks.values())
        layers = (next(left[kind]) for kind in itertools.islice(itertools.cycle(pattern), count))
        ordered.append(list(layers) if scan else tuple(layers))
    return tuple(ordered)


def _of_period(stacked: Tree, n: int) -> tuple[Tree, ...]:
    """Split stacked layers into those at each of n places of a period, stacked over periods."""
    by_period = {name: a.reshape(-1, n, *a.shape[1:]) for name, a in stacked.items()}
    return tuple({name: a[:, i] for name, a in by_period.items()} for i in range(n))


def _fuse_layer(w: Tree, ex: Execution, *, stacked: bool) -> Tree:
    """Convert one layer's arrays, or stacked ones, to the fused layout."""
    if not w:  # a dense layer has no frozen arrays
        return {}
    cfg = ex.cfg
    lead = next(iter(w.values())).shape[:stacked]
    adapters = lora.fuse(w, lead, factor(cfg)) if cfg.lora.rank else {}
    alone = {name: w[name] for name in ("router_bias",) if name in w}  # frozen, or with the others
    has_base = not w.keys().isdisjoint(("wo", "w_down", *recurrent.OUTPUTS))
    return adapters | alone | (_fuse_projections(w, lead, ex) if has_base else {})


def _fuse_module(w: Tree, ex: Execution) -> Tree:
    """Convert the arrays of one module for multi-token prediction to the fused layout."""
    own = {n: w[n] for n in mtp.DIMS if n in w}
    if "w_join" in own:
        own["w_join"] = own["w_join"].reshape(-1, own["w_join"].shape[-1])
    frozen = {n: w[n] for n in ("router_bias",) if n in w}
    return own | frozen | (_fuse_projections(w, (), ex) if "wo" in w else {})


def _fuse_projections(w: Tree, lead: tuple[int, ...], ex: Execution) -> Tree:
    """Return the fused arrays except adapters. Leading (layer) dims are unchanged."""
    flat = lambda name, *dims: w[name].reshape(*lead, *dims)  # noqa: E731
    out = {n: w[n] for n in LAYER_DIMS if n in w and not lora.is_adapter(n)}
    if "wo" in w:
        out = {n: a for n, a in out.items() if n != "wq"} | _fuse_attention(w, lead)
    elif set(recurrent.OUTPUTS) & w.keys():
        out |= recurrent.fuse(w, lead)
    if ex.fused_gate_up and "w_gate" in out:
        out["w_gate_up"] = jnp.concatenate([out.pop("w_gate"), out.pop("w_up")], axis=-1)
    if "bq" in w:
        out["bqkv"] = jnp.concatenate([flat(n, -1) for n in ("bq", "bk", "bv")], axis=-1)
    return out


def _fuse_attention(w: Tree, lead: tuple[int, ...]) -> Tree:
    flat = lambda name, *dims: w[name].reshape(*lead, *dims)  # noqa: E731
    out: Tree = {}
    if "wkv_a" in w:
        out |= {n: flat(n, w[n].shape[-3], -1) for n in ("wq", "wq_b", "wkv_b") if n in w}
    else:
        D = w["wq"].shape[-3]
        fused, names = ("wqkv", ("wq", "wk", "wv")) if "wv" in w else ("wqk", ("wq", "wk"))
        out[fused] = jnp.concatenate([flat(n, D, -1) for n in names], axis=-1)
    if "w_attn_gate" in w:
        out["w_attn_gate"] = flat("w_attn_gate", w["w_attn_gate"].shape[-3], -1)
    return out | {"wo": flat("wo", -1, w["wo"].shape[-1])}


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
    layers = tree["layers"]
    if cfg.parallel.layer_loop == "scan":
        return tree
    return tree | {"layers": _split_layers(layers, next(iter(layers.values())).shape[0])}


def map_layers(fn: Callable[..., Any], layers: tuple, *rest: tuple) -> tuple:
    """Apply `fn` to each tree in fused layers and the corresponding trees in `rest`."""

    def in_chunk(chunk: Any, *others: Any) -> Any:
        several = isinstance(chunk, (tuple, list))
        return type(chunk)(map(fn, chunk, *others)) if several else fn(chunk, *others)

    return tuple(map(in_chunk, layers, *rest))


def with_scales(weights: Tree, shards: Tree, cfg: Config) -> Tree:
    """In float8, add the scales of each layer's matrices to the weights of a step.

    Args:     weights: `shards` (ZeRO-3) or gathered weights (ZeRO-1, 2).
              shards: this device's, fused.
    Communication: `fsdp.float8_scales`: one all-reduce for all layers.
    """
    one = jax.tree.leaves(shards["layers"], is_leaf=lambda tree: isinstance(tree, dict))[0]
    if cfg.model.matmul_dtype == "compute" or all(map(lora.is_adapter, one)):
        return weights
    scales = gather.float8_scales(shards["layers"], _scaled_dims, cfg.model.dtype)
    add_scales = lambda w, s: w | {"scales": _with_common_scale(w, s)}  # noqa: E731
    return weights | {"layers": map_layers(add_scales, weights["layers"], scales)}


def _scaled_dims(w: Tree) -> dict[str, tuple[int, ...]]:
    """Return the dims of each matrix that share a scale. All experts of a layer do, so that an
    expert is rounded in the same way on every mesh."""
    experts = OF_EXPERTS if "router" in w else ()
    return {n: (-3, -2, -1) if n in experts else (-2, -1) for n in IN_FLOAT8 if n in w}


def _with_common_scale(w: Tree, scales: Tree) -> Tree:
    """Give gate and up of experts the smaller scale: a product sums over both."""
    if "router" not in w:
        return scales
    return scales | dict.fromkeys(("w_gate", "w_up"), jnp.minimum(scales["w_gate"], scales["w_up"]))


def to_shards(weights: Tree, shards: Tree) -> tuple[Tree, Tree]:
    """Separate gathered weights from the shards that receive their gradients (ZeRO-2).

    Args:     weights: of a step, gathered, perhaps with scales. shards: this device's, fused.
    Returns:  (`shards`, with scales if `weights` has them; a tree of the same structure with the
              gathered weights under `COMPLETE`), for `params.join`.
    """

    def trainable(w: Tree, shards: Tree) -> Tree:
        return shards | {n: w[n] for n in w if n == "scales"}

    def complete(w: Tree, shards: Tree, dims: gather.Dims) -> Tree:
        return {COMPLETE: {n: w[n] for n in shards if dims[n] is not None}}

    def of_layer(w: Tree, shards: Tree) -> Tree:
        return complete(w, shards, layer_dims(shards))

    own = map_layers(trainable, weights["layers"], shards["layers"])
    whole = map_layers(of_layer, weights["layers"], shards["layers"])
    top = complete(weights["top"], shards["top"], top_dims(shards["top"]))
    return {"top": shards["top"], "layers": own}, {"top": top, "layers": whole}


def only(top: Tree, name: str) -> Tree:
    """Select one of the arrays outside the layers, with its complete weight if ZeRO-2."""
    complete = {COMPLETE: {name: top[COMPLETE][name]}} if name in top.get(COMPLETE, {}) else {}
    return {name: top[name]} | complete


def without_scales(grads: Tree) -> Tree:
    """Remove the scales' entries from gradients of a tree from `with_scales`."""
    drop = lambda w: {n: g for n, g in w.items() if n != "scales"}  # noqa: E731
    return grads | {"layers": map_layers(drop, grads["layers"])}
