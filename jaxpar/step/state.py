"""The training state: step, parameters, moments; how it starts and how it is sharded.

Arrays are logical and global, under stable names, so a checkpoint means the same on every mesh.
One thing depends on the mesh: with virtual stages, a device's chunks are not neighboring layers,
so the running state holds the layers in another order. `to_logical` and `to_running` convert.
"""

import dataclasses
import functools
import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import Config
from jaxpar.model.parameters import param_specs, trainable_specs
from jaxpar.optimizer import loss_scale, moments
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.sharding.initial_values import init_options, initial_values, leaf_keys
from jaxpar.sharding.mesh import shardings
from jaxpar.sharding.params import ParamSpec, abstract, map_specs, partition_specs, split
from jaxpar.step.layer_order import layer_order


@flax.struct.dataclass
class TrainState:
    """Everything a step changes. `step` is also the position in the data."""

    step: Any
    """int32 scalar: optimizer steps taken."""
    params: Any
    """float32 master weights, as `parameters.param_specs`."""
    opt_state: Any
    """optax state; moments are shaped and sharded as the trainable parameters."""
    guard: Any = ()
    """Scalars of `loss_scale.initial_guard`."""


def optimizer_for(cfg: Config) -> optax.GradientTransformation:
    """The configured update rule for the configured model."""
    return make_optimizer(cfg.optimizer, cfg.train.num_steps, trainable_specs(cfg))


def abstract_state(cfg: Config) -> TrainState:
    """The state's global shapes and dtypes; allocates nothing."""
    params = abstract(param_specs(cfg.model, cfg.lora))
    opt_state = jax.eval_shape(functools.partial(_init_opt_state, cfg), params)
    guard = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), loss_scale.initial_guard(cfg)
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, opt_state, guard)


def _init_opt_state(cfg: Config, params: Any) -> Any:
    """The optax state of parameters that no step has changed."""
    trainable, _ = split(params, param_specs(cfg.model, cfg.lora))
    return moments.in_storage_dtype(optimizer_for(cfg).init(trainable), cfg.optimizer)


def state_specs(cfg: Config) -> TrainState:
    """The state as PartitionSpecs: moments as their parameters, everything else replicated."""
    # In place of the moments that a rule keeps of some parameters alone.
    is_none = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    opt_state = optax.tree_map_params(
        optimizer_for(cfg),
        lambda moment, spec: moment if is_none(moment) else spec,
        abstract_state(cfg).opt_state,
        partition_specs(trainable_specs(cfg)),
        transform_non_params=lambda _: PartitionSpec(),
        is_leaf=is_none,
    )
    params = partition_specs(param_specs(cfg.model, cfg.lora))
    guard = jax.tree.map(lambda _: PartitionSpec(), loss_scale.initial_guard(cfg))
    return TrainState(PartitionSpec(), params, opt_state, guard)


def state_shardings(cfg: Config, mesh: Mesh) -> TrainState:
    """The state as NamedShardings; with `optimizer.offload`, moments are in host memory."""
    tree = shardings(mesh, state_specs(cfg))
    if not cfg.optimizer.offload:
        return tree
    on_host = lambda _, __, sharding: sharding.with_memory_kind("pinned_host")  # noqa: E731
    return dataclasses.replace(tree, opt_state=moments.map_moments(on_host, tree.opt_state))


def bytes_per_device(state: TrainState) -> int:
    """Bytes of one device's shards of a state, or of its abstract arrays with shardings; those in
    host memory count too."""
    shard = lambda a: math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize  # noqa: E731
    return sum(map(shard, jax.tree.leaves(state)))


def init_state(cfg: Config, mesh: Mesh) -> TrainState:
    """A fresh state, each device making only its own shards.

    Parameters depend on (train.seed, path) alone: the same bits on every mesh.
    """
    params = init_params(param_specs(cfg.model, cfg.lora), cfg, mesh)
    return state_of(params, cfg, mesh)


def init_params(specs: Any, cfg: Config, mesh: Mesh) -> Any:
    """Fresh parameters in running order: all of a model's, or those of its `specs` that are asked
    for, which are the same then."""
    to = shardings(mesh, partition_specs(specs))
    params = _init_params(specs, cfg.train.seed, to)
    return to_running(TrainState((), params, ()), cfg).params


def state_of(params: Any, cfg: Config, mesh: Mesh) -> TrainState:
    """The state at step 0 with given parameters, in running order."""
    to = state_shardings(cfg, mesh)
    opt_state = jax.jit(functools.partial(_init_opt_state, cfg), out_shardings=to.opt_state)
    # Made in a program: with several processes, device_put would compare what each of them puts.
    scalars = lambda: (jnp.int32(0), loss_scale.initial_guard(cfg))  # noqa: E731
    step, guard = jax.jit(scalars, out_shardings=(to.step, to.guard))()
    return TrainState(step, params, opt_state(params), guard)


def _init_params(specs: Any, seed: int, to: Any) -> Any:
    """`initial_values.initialize` with a program for each array, compiled side by side.

    In one program, XLA would compile the arrays' generators one after another on one core. Keys
    are made by operations that JAX keeps compiled, whichever parameters there are.
    """
    keys = leaf_keys(specs, seed)
    with ThreadPoolExecutor() as pool:

        def start(spec: ParamSpec, to: NamedSharding, key: jax.Array) -> Future:
            device: Any = next(iter(to.device_set))
            return pool.submit(_initial_values(spec, to, init_options(device.platform)), key)

        return jax.tree.map(Future.result, map_specs(start, specs, to, keys))


@functools.cache
def _initial_values(spec: ParamSpec, sharding: NamedSharding, options: tuple):
    """The compiled generator of one array, and of those like it."""
    make = functools.partial(initial_values, spec)
    return jax.jit(make, out_shardings=sharding, compiler_options=dict(options))


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


def snapshot(state: TrainState, cfg: Config) -> TrainState:
    """`to_logical`, whose arrays in host memory are its own.

    What reads an array there reads it in place, so the step that is given `state` could not
    overwrite it, or would overwrite what is being read. One on the device is copied by its reader.
    """

    def own(new: jax.Array, old: jax.Array) -> jax.Array:
        shared = new is old and new.sharding.memory_kind == "pinned_host"
        return _convert(new.sharding, new.dtype)(new) if shared else new

    return jax.tree.map(own, to_logical(state, cfg), state)


def in_configured_dtypes(state: TrainState, cfg: Config) -> TrainState:
    """The state with its moments in the dtypes that the config keeps them in; shardings stay."""

    def converted(field: str | None, _: str, x: jax.Array) -> jax.Array:
        dtype = jnp.dtype(moments.storage_dtype(field, cfg.optimizer))
        return x if x.dtype == dtype else _convert(x.sharding, dtype)(x)

    return dataclasses.replace(state, opt_state=moments.map_moments(converted, state.opt_state))


@functools.cache
def _convert(sharding: Any, dtype: Any):
    """The compiled conversion of an array, by way of the device; to its own dtype, a copy."""

    def convert(x: jax.Array) -> jax.Array:
        # Without the barrier, XLA would make a copy within host memory out of it.
        on_device = lax.optimization_barrier(jax.device_put(x, jax.memory.Space.Device))
        return on_device.astype(dtype)

    return jax.jit(convert, out_shardings=sharding)


@functools.cache
def _take(sharding: Any, ndim: int):
    """The compiled reordering of one layer-stacked array, on the device."""
    del ndim  # part of the cache's key, as one sharding may serve arrays of several ranks

    def take(x: jax.Array, order: jax.Array) -> jax.Array:
        return jnp.take(jax.device_put(x, jax.memory.Space.Device), order, axis=0)

    return jax.jit(take, out_shardings=sharding)
