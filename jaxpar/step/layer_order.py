"""The places where a mesh stores the model's layers.

A running state has the same number of slots for layers on every stage of a pipeline, those of each
chunk together; so do the arrays of the layers of each name. If chunks have unequal numbers of
layers (`config/layout/layer_split.py`), the shorter ones end with empty slots, which are zero.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.components.experts import Experts
from jaxpar.config import Config
from jaxpar.config.layout.layer_split import (
    is_equal,
    layers_per_chunk,
    slots_per_chunk,
)
from jaxpar.model.chunks import layers_of_chunk, scan_period
from jaxpar.model.fused_weights import IN_USE
from jaxpar.model.probes import num_before
from jaxpar.sharding.axes import PIPELINE
from jaxpar.sharding.params import ParamSpec, is_spec

#: Index of the layer in an empty slot.
EMPTY = -1


@functools.lru_cache(maxsize=64)
def _layers_of_slots(cfg: Config) -> np.ndarray:
    """Return the layer in each slot, or EMPTY, int [P, v, slots of a chunk]. Those before the
    stages (`layers_before_stages`) do not count."""
    table, m = _sizes(cfg), slots_per_chunk(cfg)
    begins = (np.cumsum(table.T) - table.T.ravel()).reshape(table.T.shape).T
    slots = np.arange(m)
    return np.where(slots < table[..., None], begins[..., None] + slots, EMPTY)


def layer_order(cfg: Config) -> np.ndarray | None:
    """Return the layer in each slot of all stages, or EMPTY; None if they are in order.

    Those before the stages do not count.
    """
    if cfg.parallel.virtual_stages == 1 and is_equal(cfg):
        return None
    return _layers_of_slots(cfg).ravel()


def stack_order(cfg: Config, stack: str) -> np.ndarray | None:
    """`layer_order` of the layers of one name: their indices among those of the name."""
    if layer_order(cfg) is None:
        return None
    names = [layer.name for layer in cfg.model.layers[num_before(cfg) :]]
    within = np.array([names[:i].count(name) for i, name in enumerate(names)])
    mine = [i for i, layer in enumerate(layers_of_chunk(cfg)) if layer.name == stack]
    layers = _layers_of_slots(cfg)[..., mine].ravel()
    return np.where(layers == EMPTY, EMPTY, within[layers])


def layers_here(cfg: Config, stack: str | None = None) -> jax.Array:
    """Return the logical indices of this device's layers, int32. Called inside the step.

    Those before the stages do not count.

    Args:     stack: the name of those to return, with their indices among the layers of the name.
              None: all, with their indices in the model.
    """
    per_chunk = slots_per_chunk(cfg) if stack is None else _slots_of(stack, cfg)
    order = layer_order(cfg) if stack is None else stack_order(cfg, stack)
    per_stage = cfg.parallel.virtual_stages * per_chunk
    places = jnp.arange(per_stage, dtype=jnp.int32) + lax.axis_index(PIPELINE) * per_stage
    return places if order is None else jnp.asarray(order, jnp.int32)[places]


def rows_here(cfg: Config) -> dict[str, jax.Array]:
    """Return `layers_here` of the names whose layers a mesh may have in another order, int32."""
    stacks = cfg.model.stage_stacks
    if len(stacks) > 1 and layer_order(cfg) is None:
        return {}
    return {stack: layers_here(cfg, stack) for stack in stacks}


def expert_layers_here(cfg: Config) -> jax.Array:
    """Return the indices of this device's layers among those with experts, or EMPTY, int32."""
    layers = cfg.model.layers[num_before(cfg) :]
    has_experts = np.array([isinstance(layer.feed_forward, Experts) for layer in layers])
    first = int(np.argmax(has_experts))
    if has_experts[first:].all():  # those before them are on the only stage
        here = layers_here(cfg)[first:]
        return here - first if first else here
    chunk = has_experts[: slots_per_chunk(cfg)]
    per_stage = cfg.parallel.virtual_stages * int(chunk.sum())
    begin = lax.axis_index(PIPELINE) * per_stage
    if layer_order(cfg) is None:
        return jnp.arange(per_stage, dtype=jnp.int32) + begin
    slots = _layers_of_slots(cfg)[..., chunk].ravel()
    among = np.where(slots == EMPTY, EMPTY, (np.cumsum(has_experts) - 1)[slots])
    return lax.dynamic_slice_in_dim(jnp.asarray(among, jnp.int32), begin, per_stage)


def num_slots(cfg: Config) -> int:
    """Return the number of slots for layers of all stages together."""
    return cfg.parallel.pipeline * cfg.parallel.virtual_stages * slots_per_chunk(cfg)


def _slots_of(stack: str, cfg: Config) -> int:
    """Return the number of slots of a chunk for the layers of one name."""
    return sum(layer.name == stack for layer in layers_of_chunk(cfg))


def stack_of(path: Any, cfg: Config) -> str | None:
    """Return the name of the layers of an array with a row for each of their slots; None for other
    arrays.

    Args:     path: of a leaf in a tree of parameters or of a state. "layers" are all layers, unless
              it is the name of some.
    """
    names = {"layers", *cfg.model.stage_stacks}
    keys = (getattr(entry, "key", None) for entry in path)
    return next((key for key in keys if key in names), None)


def order_of(path: Any, cfg: Config) -> np.ndarray | None:
    """Return `stack_order` of the array at a path, or None if it has no order of slots."""
    stack = stack_of(path, cfg)
    if stack is None:
        return None
    return stack_order(cfg, stack) if stack in cfg.model.stacks else layer_order(cfg)


def with_slots(specs: Any, cfg: Config) -> Any:
    """Return the specs of a running state's arrays: with a row for each slot, not each layer."""

    def of(path: Any, spec: ParamSpec) -> ParamSpec:
        order = order_of(path, cfg)
        if order is None or spec.axes[0] != "layer":
            return spec
        return dataclasses.replace(spec, shape=(len(order), *spec.shape[1:]))

    if is_equal(cfg):
        return specs
    return jax.tree_util.tree_map_with_path(of, specs, is_leaf=is_spec)


def slots_in_use(cfg: Config) -> Any:
    """Return which slots of this device have a layer, beside the weights of each (`params.join`).

    Called inside the step. Slots that every chunk uses have no entry.

    Returns:  {} if every slot is used; otherwise a tree like that of `fused_weights.fuse`, whose
              entries IN_USE are bool scalars, or bool [layers] for stacked layers.
    """
    if is_equal(cfg):
        return {}
    sizes, m = _sizes(cfg), slots_per_chunk(cfg)
    period = scan_period(layers_of_chunk(cfg))
    here = jnp.asarray(sizes, jnp.int32)[lax.axis_index(PIPELINE)]
    chunks: list[Any] = []
    for size in here:
        used = jnp.arange(m) < size
        if cfg.parallel.layer_loop == "scan":
            of_places = [{IN_USE: used.reshape(-1, period)[:, i]} for i in range(period)]
            chunks.append(of_places if period > 1 else {IN_USE: used})
        else:
            every = sizes.min()
            chunks.append(tuple({IN_USE: used[i]} if i >= every else {} for i in range(m)))
    return {"top": {}, "layers": tuple(chunks)}


def _sizes(cfg: Config) -> np.ndarray:
    """Layers of each chunk, int [P, v]."""
    p = cfg.parallel
    return np.array(layers_per_chunk(cfg)).reshape(p.virtual_stages, p.pipeline).T
