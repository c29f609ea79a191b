"""The training state: step, parameters, moments; how it starts and how it is sharded.

Arrays are logical and global, under stable names, so a checkpoint means the same on every mesh.
One thing depends on the mesh: with virtual stages, a device's chunks are not neighbouring layers,
so the running state holds the layers in another order. `to_logical` and `to_running` convert.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.config import Config
from jaxpar.model.transformer import param_specs
from jaxpar.optimizer import make_optimizer
from jaxpar.parallel.mesh import shardings
from jaxpar.params import abstract, initialize, partition_specs


@flax.struct.dataclass
class TrainState:
    """Everything a step changes. `step` is also the position in the data."""

    step: Any
    """int32 scalar: optimiser steps taken."""
    params: Any
    """float32 master weights, as `transformer.param_specs`."""
    opt_state: Any
    """optax state; moments are shaped and sharded as the parameters."""


def optimizer_for(cfg: Config) -> optax.GradientTransformation:
    """The configured update rule for the configured model."""
    return make_optimizer(cfg.optimizer, cfg.train.num_steps, param_specs(cfg.model))


def abstract_state(cfg: Config) -> TrainState:
    """The state's global shapes and dtypes; allocates nothing."""
    params = abstract(param_specs(cfg.model))
    opt_state = jax.eval_shape(optimizer_for(cfg).init, params)
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, opt_state)


def state_specs(cfg: Config) -> TrainState:
    """The state as PartitionSpecs: moments as their parameters, everything else replicated."""
    specs = partition_specs(param_specs(cfg.model))
    opt_state = optax.tree_map_params(
        optimizer_for(cfg),
        lambda _, spec: spec,
        abstract_state(cfg).opt_state,
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )
    return TrainState(PartitionSpec(), specs, opt_state)


def state_shardings(cfg: Config, mesh: Mesh) -> TrainState:
    """The state as NamedShardings."""
    return shardings(mesh, state_specs(cfg))


def init_state(cfg: Config, mesh: Mesh) -> TrainState:
    """A fresh state, each device making only its own shards.

    Parameters depend on (train.seed, path) alone: the same bits on every mesh.
    """

    def init(seed):
        params = initialize(param_specs(cfg.model), seed)
        return TrainState(jnp.int32(0), params, optimizer_for(cfg).init(params))

    state = jax.jit(init, out_shardings=state_shardings(cfg, mesh))(cfg.train.seed)
    return to_running(state, cfg)


def layer_order(cfg: Config) -> np.ndarray | None:
    """Which logical layer each place of the running state holds; None for the logical order."""
    P, v = cfg.parallel.pipeline, cfg.parallel.virtual_stages
    if v == 1:
        return None
    chunks = np.arange(cfg.model.num_layers).reshape(v, P, -1)
    return chunks.transpose(1, 0, 2).ravel()


def to_running(state: TrainState, cfg: Config) -> TrainState:
    """The state in the order the mesh runs it, from the logical order."""
    order = layer_order(cfg)
    return state if order is None else _reorder(state, order)


def to_logical(state: TrainState, cfg: Config) -> TrainState:
    """The state in the order of the model, for a checkpoint."""
    order = layer_order(cfg)
    return state if order is None else _reorder(state, np.argsort(order))


def _reorder(state: TrainState, order: np.ndarray) -> TrainState:
    """Take the layers of parameters and moments in another order; shardings stay."""

    def is_layer(path) -> bool:
        return any(getattr(key, "key", None) == "layers" for key in path)

    def one(path, x):
        return _take(x.sharding, x.ndim)(x, order) if is_layer(path) else x

    return jax.tree_util.tree_map_with_path(one, state)


@functools.cache
def _take(sharding: Any, ndim: int):
    """The compiled reordering of one layer-stacked array."""
    del ndim  # part of the cache's key, as one sharding may serve arrays of several ranks
    return jax.jit(lambda x, order: jnp.take(x, order, axis=0), out_shardings=sharding)
