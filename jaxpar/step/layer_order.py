"""The places where a mesh stores the model's layers.

A running state has the same number of slots for layers on every stage of a pipeline, those of each
chunk together. If chunks have unequal numbers of layers (`config/layout/layer_split.py`), the
shorter ones end with empty slots, which are zero.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.config import Config
from jaxpar.config.layout.composition import DENSE, model_of, stacks_of_experts
from jaxpar.config.layout.layer_split import is_equal, layers_per_chunk, slots_per_chunk
from jaxpar.model.fused_weights import IN_USE
from jaxpar.sharding.axes import PIPELINE
from jaxpar.sharding.params import ParamSpec, map_specs

#: Index of the layer in an empty slot.
EMPTY = -1


def layer_order(cfg: Config) -> np.ndarray | None:
    """Return the logical layer in each slot of the running state, or EMPTY; None if unchanged."""
    if cfg.parallel.virtual_stages == 1 and is_equal(cfg):
        return None
    table, m = _sizes(cfg), slots_per_chunk(cfg)
    begins = (np.cumsum(table.T) - table.T.ravel()).reshape(table.T.shape).T
    slots = np.arange(m)
    layers = np.where(slots < table[..., None], begins[..., None] + slots, EMPTY)
    return layers.ravel()


def layers_here(cfg: Config) -> jax.Array:
    """Return the logical indices of this device's layers, int32. Called inside the step.

    Those before the stages (`dense_before_stages`) do not count.
    """
    per_stage, order = num_slots(cfg) // cfg.parallel.pipeline, layer_order(cfg)
    places = jnp.arange(per_stage, dtype=jnp.int32) + lax.axis_index(PIPELINE) * per_stage
    return places if order is None else jnp.asarray(order, jnp.int32)[places]


def expert_layers_here(cfg: Config) -> jax.Array:
    """Return the indices of this device's layers among those with experts, or EMPTY, int32."""
    if len(model_of(cfg.model).stacks.keys() - {DENSE}) > 1:  # stages have the same layers
        per_stage = len(stacks_of_experts(cfg.model)) // cfg.parallel.pipeline
        return jnp.arange(per_stage, dtype=jnp.int32) + lax.axis_index(PIPELINE) * per_stage
    dense = 0 if cfg.parallel.pipeline > 1 else cfg.model.dense_layers
    layers = layers_here(cfg)[dense:]
    return layers - dense if dense else layers


def num_slots(cfg: Config) -> int:
    """Return the number of slots for layers of all stages together."""
    return cfg.parallel.pipeline * cfg.parallel.virtual_stages * slots_per_chunk(cfg)


def with_slots(specs: Any, cfg: Config) -> Any:
    """Return the specs of a running state's arrays: with a row for each slot, not each layer."""

    def of(spec: ParamSpec) -> ParamSpec:
        if spec.axes[0] != "layer":
            return spec
        return dataclasses.replace(spec, shape=(num_slots(cfg), *spec.shape[1:]))

    return specs if is_equal(cfg) else map_specs(of, specs)


def slots_in_use(cfg: Config) -> Any:
    """Return which slots of this device have a layer, beside the weights of each (`params.join`).

    Called inside the step. Slots that every chunk uses have no entry.

    Returns:  {} if every slot is used; otherwise a tree like that of `fused_weights.fuse`, whose
              entries IN_USE are bool scalars, or bool [layers] for stacked layers.
    """
    if is_equal(cfg):
        return {}
    sizes, m = _sizes(cfg), slots_per_chunk(cfg)
    here = jnp.asarray(sizes, jnp.int32)[lax.axis_index(PIPELINE)]
    chunks: list[Any] = []
    for size in here:
        used = jnp.arange(m) < size
        if cfg.parallel.layer_loop == "scan":
            chunks.append({IN_USE: used})
        else:
            every = sizes.min()
            chunks.append(tuple({IN_USE: used[i]} if i >= every else {} for i in range(m)))
    return {"top": {}, "layers": tuple(chunks)}


def _sizes(cfg: Config) -> np.ndarray:
    """Layers of each chunk, int [P, v]."""
    p = cfg.parallel
    return np.array(layers_per_chunk(cfg)).reshape(p.virtual_stages, p.pipeline).T
