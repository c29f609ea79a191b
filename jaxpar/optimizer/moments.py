"""The optimizer's moments: their storage dtype and memory space, and the update that uses them.

An update is always computed in float32 on the device. Between steps, moments may be stored as
stochastically rounded bfloat16 or in 8 bits (`optimizer.first_moment_dtype`,
`second_moment_dtype`), and in pinned host memory (`optimizer.offload`), and the master weights too
(`optimizer.offload_masters`). A step then fetches, updates and returns them layer by layer, so that
only one layer's are on the device at a time.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.config import Config, ConfigError, OptimizerConfig
from jaxpar.config.layout.moment_blocks import EIGHT_BITS, uses_blocks
from jaxpar.optimizer.adafactor import cut_of
from jaxpar.optimizer.blockwise import (
    DynamicCode,
    blocks_in,
    blocks_of,
    dequantize,
    is_quantized,
    quantize,
    scales_of,
)
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.optimizer.stochastic_rounding import random_bits, round_to_bfloat16
from jaxpar.parallel.host_offload import Space, in_host_memory
from jaxpar.sharding.hashing import hash_uint32, places
from jaxpar.sharding.params import ParamSpec, flat, map_specs, partition_specs

#: optax's names of moments, each with the config field of its storage dtype.
FIELDS = {"mu": "first_moment_dtype", "trace": "first_moment_dtype", "nu": "second_moment_dtype"}


def map_moments(fn: Callable[..., Any], params: Any, opt_state: Any, *others: Any) -> Any:
    """Apply `fn(field, name, moment, ...)` to the moments of an optax state.

    Moments are all trees that have the structure of the parameters, whatever the rule calls them.
    Counts are unchanged.

    Args:     fn: a function of the moment's entry in FIELDS (None if it has none), the parameter's
              name, such as "layers/wq", and the moments: arrays, or in 8 bits
              {"codes": ..., "scales": ...}. params: the parameters, or a tree with their names,
              such as their specs.
    """
    is_moments = _has_names_of(params)

    def one(path, node, *rest):
        if not is_moments(node):
            return node
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        field = FIELDS.get(names[-1]) if names else None
        named = lambda at, *leaves: fn(field, "/".join(key.key for key in at), *leaves)  # noqa: E731
        return jax.tree_util.tree_map_with_path(named, node, *rest, is_leaf=is_quantized)

    return jax.tree_util.tree_map_with_path(one, opt_state, *others, is_leaf=is_moments)


def specs_of_state(opt_state: Any, specs: Any) -> Any:
    """Return the PartitionSpecs of an optax state: moments as their parameters, others replicated.

    Args:     opt_state: abstract or not. specs: of the trainable parameters.
    """
    spec_of, is_moments = flat(specs), _has_names_of(specs)

    def one(path, node):
        if not is_moments(node):
            return PartitionSpec()
        kind = next((key.name for key in reversed(path) if hasattr(key, "name")), "")
        name = lambda at: "/".join(key.key for key in at)  # noqa: E731

        def of(at, moment):
            partition = _moment_spec(kind, spec_of[name(at)])
            return jax.tree.map(lambda _: partition, moment)

        return jax.tree_util.tree_map_with_path(of, node, is_leaf=is_quantized)

    return jax.tree_util.tree_map_with_path(one, opt_state, is_leaf=is_moments)


def _moment_spec(kind: str, spec: ParamSpec) -> PartitionSpec:
    """Return the PartitionSpec of a parameter's moment, which may have some of its dims."""
    dims, cut = spec.partition_spec, cut_of(spec)
    if kind == "nu_rows":
        return PartitionSpec(*dims[:cut])
    if kind == "nu_columns":
        return PartitionSpec(*dims[: spec.lead], *dims[cut:])
    return dims


def _has_names_of(params: Any) -> Callable[[Any], bool]:
    """Return whether a node is a tree of some of these parameters, by the names at its root."""
    return lambda node: isinstance(node, dict) and bool(node) and node.keys() <= params.keys()


def storage_dtype(field: str | None, cfg: OptimizerConfig) -> str:
    """Return the dtype in which a moment is stored."""
    return "float32" if field is None else getattr(cfg, field)


def code_of(field: str | None) -> DynamicCode:
    """Return the code of a moment in 8 bits: signed for first moments."""
    return DynamicCode(signed=field == "first_moment_dtype")


def stored(field: str | None, spec: ParamSpec, moment: Any, cfg: OptimizerConfig) -> Any:
    """Convert a moment to the config's storage, rounding to nearest. The inverse of `in_float32`.

    Args:     spec: of its parameter. moment: an array of any dtype.
    """
    dtype = storage_dtype(field, cfg)
    if dtype != EIGHT_BITS:
        return moment.astype(dtype)
    exact, blocks = moment.astype(jnp.float32), blocks_of(spec, cfg)
    return exact if blocks is None else quantize(exact, blocks, code_of(field))


def in_float32(field: str | None, moment: Any) -> jax.Array:
    """Return a stored moment in float32."""
    if is_quantized(moment):
        return dequantize(moment, code_of(field))
    return moment.astype(jnp.float32)


def in_storage_dtype(opt_state: Any, cfg: OptimizerConfig, specs: Any) -> Any:
    """Convert moments to their storage dtypes, rounding to nearest.

    Args:     specs: of the trainable parameters.
    Raises:   ConfigError if the config has a storage dtype for a moment that the rule does not
              have.
    """
    fields, spec_of = set[str | None](), flat(specs)

    def store(field: str | None, name: str, moment: jax.Array) -> Any:
        fields.add(field)
        return stored(field, spec_of[name], moment, cfg) if field else moment

    found = map_moments(store, specs, opt_state)
    for field in sorted(set(FIELDS.values()) - fields):
        if storage_dtype(field, cfg) != "float32":
            path, names = f"optimizer.{field}", (n for n, of in FIELDS.items() if of == field)
            name = cfg.name if isinstance(cfg.name, str) else type(cfg.name).__name__
            rule = f"has no effect, because {name} has no moment named {' or '.join(names)}"
            raise ConfigError(path, storage_dtype(field, cfg), rule, f"--{path} float32")
    return found


def update(
    cfg: Config,
    specs: Any,
    grads: Any,
    opt_state: Any,
    params: Any,
    step: jax.Array,
    layers: Mapping[str, jax.Array],
    ok: jax.Array | bool = True,
    rates: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Update the trainable parameters once, on local shards.

    Args:     specs: of the trainable parameters. grads: float32, with the structure of the
              parameters. opt_state: with moments as stored. step: int32 scalar. layers: int32, the
              logical indices of this device's layers, by their names; names without are in order.
              ok: bool scalar; if False, parameters and state are returned unchanged, bit for bit.
              The selection needs no extra pass over memory. rates: as in `make_optimizer`.
    Returns:  (parameters, opt_state), in the dtypes and memory spaces of the inputs.
    """
    rows = rows_of(specs, params, layers)
    trees = grads, opt_state, params, rows
    if not cfg.optimizer.offload:
        return _update(cfg, specs, step, ok, *trees, rates=rates)
    stacks = [[name] for name in cfg.model.stage_stacks if name in params]
    top = [name for name in params if [name] not in stacks]
    parts = [
        _in_slices(cfg, specs, step, ok, [_entries(tree, params, names) for tree in trees], rates)
        for names in (top, *stacks)
        if names
    ]
    new, kept = zip(*parts, strict=True)
    return _merged(params, params, new), _merged(opt_state, params, kept)


def rows_of(specs: Any, params: Any, layers: Mapping[str, jax.Array]) -> Any:
    """Return the index, in the logical array, of each row of each shard along its first dim.

    Args:     layers: as in `update`.
    """

    def of(name: str, spec: ParamSpec, param: jax.Array) -> jax.Array:
        if spec.axes[0] == "layer" and name in layers:
            return layers[name]
        return places(len(param), spec.partition_spec[0])

    return {
        name: map_specs(functools.partial(of, name), specs[name], param)
        for name, param in params.items()
    }


def _update(
    cfg: Config,
    specs: Any,
    step: jax.Array,
    ok: Any,
    grads: Any,
    opt_state: Any,
    params: Any,
    rows: Any,
    rates: jax.Array | None,
):
    """Update all rows of `params` at once, if `ok`, with moments on the device."""
    specs = {name: specs[name] for name in params}
    rule = make_optimizer(cfg.optimizer, cfg.train.num_steps, specs, sharded=True, rates=rates)
    exact_of = lambda field, _, leaf: in_float32(field, leaf) if field else leaf  # noqa: E731
    in_full = lambda kept: map_moments(exact_of, params, kept)  # noqa: E731
    advance = lambda grads, kept: rule.update(grads, in_full(kept), params)  # noqa: E731
    scales = opt_state
    if uses_blocks(cfg.optimizer):
        # A pass for the scales, and one that computes the same again: without the barrier, XLA
        # would keep the float32 moments of the first one in memory. Gradients have none, since it
        # would make XLA write those that are clipped or cast within the update.
        scales = map_moments(_new_scales, params, advance(grads, opt_state)[1], opt_state)
        opt_state, scales = lax.optimization_barrier((opt_state, scales))
    updates, exact = advance(grads, opt_state)
    spec_of, row_of = flat(partition_specs(specs)), flat(rows)

    def keep(field: str | None, name: str, leaf: jax.Array, old: Any, scale: Any) -> Any:
        if is_quantized(old):
            return quantize(leaf, blocks_in(old), code_of(field), scale)
        if storage_dtype(field, cfg.optimizer) != "bfloat16":
            return leaf
        seed = jnp.uint32(cfg.train.seed ^ zlib.crc32(f"{field}/{name}".encode()))
        key = hash_uint32(hash_uint32(seed) + step.astype(jnp.uint32))
        return round_to_bfloat16(leaf, random_bits(key, leaf.shape, spec_of[name], row_of[name]))

    new = optax.apply_updates(params, updates)
    kept = map_moments(keep, params, exact, opt_state, scales)
    old = params, opt_state
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), (new, kept), old)


def _new_scales(_: Any, __: str, moment: jax.Array, old: Any) -> jax.Array | None:
    """Return the scales of a new moment, if it is stored in 8 bits."""
    return scales_of(moment, blocks_in(old)) if is_quantized(old) else None


# ------------------------------------------------------------- moments in host memory

#: Maximum number of slices of the arrays outside the layers, which are few and large.
TOP_SLICES = 16


def _in_slices(
    cfg: Config,
    specs: Any,
    step: jax.Array,
    ok: Any,
    trees: Sequence[Any],
    rates: jax.Array | None,
) -> tuple[Any, Any]:
    """Apply `_update` slice by slice: stacked layers one layer at a time.

    The loop is kept even for a few slices. With host copies outside a loop, XLA's scheduler would
    delay the gradients that the copies wait for.

    Args:     trees: gradients, optax state, parameters and rows, of the stacked layers or of all
              other parameters.
    Returns:  (parameters, optax state).
    """
    grads, opt_state, params, rows = trees
    moments = [a for a in jax.tree.leaves(opt_state) if a.ndim]
    lengths = math.gcd(*map(len, [*jax.tree.leaves(params), *moments]))
    most = lengths if params.keys() <= {*cfg.model.stage_stacks} else TOP_SLICES
    slices = max(n for n in range(1, most + 1) if lengths % n == 0)

    def part(a: jax.Array, i: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(a, i * (len(a) // slices), len(a) // slices)
        return jax.device_put(rows, Space.Device) if in_host_memory(a) else rows

    def put(a: jax.Array, new: jax.Array, i: jax.Array) -> jax.Array:
        new = jax.device_put(new, Space.Host) if in_host_memory(a) else new
        return lax.dynamic_update_slice_in_dim(a, new, i * len(new), 0)

    def body(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        here = lambda tree: jax.tree.map(lambda a: part(a, i), tree)  # noqa: E731
        # Every slice belongs to the same step, so counts come from before the loop.
        fetched = lambda _, __, ___, kept: here(kept)  # noqa: E731
        kept = map_moments(fetched, params, opt_state, carry[1])
        local = here(grads), kept, here(carry[0]), here(rows)
        new, kept = _update(cfg, specs, step, ok, *local, rates=rates)
        back = lambda tree, new: jax.tree.map(lambda a, b: put(a, b, i), tree, new)  # noqa: E731
        returned = lambda _, __, new, kept: back(kept, new)  # noqa: E731
        return back(carry[0], new), map_moments(returned, params, kept, carry[1])

    return lax.fori_loop(0, slices, body, (params, opt_state))


def _entries(tree: Any, params: Any, names: Iterable[str]) -> Any:
    """Keep only some entries of each tree with the names of the parameters within a tree."""
    is_model = _has_names_of(params)
    pick = lambda node: {n: node[n] for n in names} if is_model(node) else node  # noqa: E731
    return jax.tree.map(pick, tree, is_leaf=is_model)


def _merged(like: Any, params: Any, parts: Iterable[Any]) -> Any:
    """Undo `_entries`: merge `parts` into one tree like `like`, with the first part's counts."""
    is_model = _has_names_of(params)

    def join(node: Any, *found: Any) -> Any:
        return {n: v for f in found for n, v in f.items()} if is_model(node) else found[0]

    return jax.tree.map(join, like, *parts, is_leaf=is_model)
