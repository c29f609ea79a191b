"""The training state (step, parameters, moments), its initialization and its sharding.

Arrays are logical and global and have stable names, so a checkpoint means the same on every mesh.
Only the places of layers depend on the mesh (`layer_order.py`): with virtual stages, a device's
chunks are not neighboring layers, so the running state stores the layers in a different order; with
unequal stages, it has empty slots. `to_logical` and `to_running` convert between the two.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import Config
from jaxpar.config.layout.layer_split import is_equal
from jaxpar.config.schema.optimizer import AVERAGED
from jaxpar.model.parameters import specs_of, trainable_specs
from jaxpar.optimizer import loss_scale, moments
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.sharding.initial_values import init_options, initial_values, leaf_keys
from jaxpar.sharding.mesh import shardings
from jaxpar.sharding.params import ParamSpec, abstract, join, map_specs, partition_specs, split
from jaxpar.step.conversions import convert_dtype
from jaxpar.step.diloco import trainers
from jaxpar.step.features import features_of
from jaxpar.step.layer_order import layer_order, order_of, stack_of, with_slots
from jaxpar.step.unequal_stages import logical_sharding, to_layers, to_slots


@flax.struct.dataclass
class TrainState:
    """Everything that a step changes. `step` is also the position in the data."""

    step: Any
    """int32 scalar: number of optimizer steps taken."""
    params: Any
    """float32 master weights, with the structure of `parameters.specs_of`; in host memory with
    `optimizer.offload_masters`."""
    opt_state: Any
    """optax state. Moments have the shapes and shardings of the trainable parameters."""
    extra: dict[str, Any] = flax.struct.field(default_factory=dict)
    """State of features, by name (`feature.py`); those without state have no entry."""

    @property
    def saved(self) -> dict[str, Any]:
        """The parts that a checkpoint has, by name: without what there is none of."""
        return {"step": self.step, "params": self.params, "opt_state": self.opt_state} | self.extra

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "TrainState":
        """Return the state with these parts: the inverse of `saved`."""
        own = {name: saved.get(name, ()) for name in ("step", "params", "opt_state")}
        return cls(**own).with_extra(**{n: part for n, part in saved.items() if n not in own})

    def with_extra(self, **extra: Any) -> "TrainState":
        """Replace the state of features, by name. () removes it."""
        parts = {name: part for name, part in (self.extra | extra).items() if part != ()}
        return dataclasses.replace(self, extra=parts)


def optimizer_for(cfg: Config) -> optax.GradientTransformation:
    """Return the configured update rule for the configured model."""
    return make_optimizer(cfg.optimizer, cfg.train.num_steps, trainable_specs(cfg))


def abstract_state(cfg: Config) -> TrainState:
    """Return the running state's global shapes and dtypes without allocating arrays."""
    return _abstract(cfg, with_slots(specs_of(cfg), cfg))


def abstract_params(cfg: Config) -> Any:
    """Return the global shapes and dtypes of the parameters, in a checkpoint's form."""
    return abstract(specs_of(cfg))


def abstract_logical(cfg: Config, mesh: Mesh) -> TrainState:
    """Return the shapes, dtypes and shardings of `to_logical`, those of a checkpoint's arrays."""
    arrays, running = _abstract(cfg, specs_of(cfg)), state_shardings(cfg, mesh)
    place = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    return jax.tree.map(place, arrays, logical_shardings(arrays, running, cfg))


def abstract_weights(cfg: Config, mesh: Mesh) -> dict[str, Any]:
    """Return the parts of `abstract_logical` that a reader of the weights needs, by name.

    They are the parameters; with a moving average, the average and the parameters that are frozen.
    """
    logical = abstract_logical(cfg, mesh)
    if not cfg.optimizer.ema:
        return {"params": logical.params}
    _, frozen = split(logical.params, specs_of(cfg))
    return {AVERAGED: logical.extra[AVERAGED]} | ({"params": frozen} if frozen else {})


def _abstract(cfg: Config, specs: Any) -> TrainState:
    params = abstract(specs)
    opt_state = jax.eval_shape(functools.partial(init_opt_state, cfg), params)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(step, params, opt_state, abstract(extra_specs(cfg, specs)))
    state = trainers.abstract_replicas(state, trainers.num_trainers(cfg))
    exchange = jax.eval_shape(functools.partial(trainers.nothing_exchanged, cfg=cfg), params)
    return trainers.with_exchange(state, exchange)


def extra_specs(cfg: Config, specs: Any = None) -> dict[str, Any]:
    """Return the ParamSpecs of what each feature keeps, by name.

    Args:     specs: of all parameters. None: those of a logical state.
    """
    specs = specs_of(cfg) if specs is None else specs
    trainable, _ = split(specs, specs)
    found = ((f.name, f.extra(cfg, trainable)) for f in features_of(cfg))
    return {name: kept for name, kept in found if kept != ()}


def feedback_of(cfg: Config, specs: Any = None) -> Any:
    """Return the specs of what compressed sums over replicas keep; () without."""
    return extra_specs(cfg, specs).get("feedback", ())


def init_opt_state(cfg: Config, params: Any) -> Any:
    """Return the initial optax state for the given parameters."""
    trainable, _ = split(params, specs_of(cfg))
    state = optimizer_for(cfg).init(trainable)
    return moments.in_storage_dtype(state, cfg.optimizer, trainable_specs(cfg))


def state_specs(cfg: Config) -> TrainState:
    """Return the state's PartitionSpecs: moments as their parameters, other leaves replicated."""
    opt_state = moments.specs_of_state(abstract_state(cfg).opt_state, trainable_specs(cfg))
    params = partition_specs(specs_of(cfg))
    state = TrainState(PartitionSpec(), params, opt_state, partition_specs(extra_specs(cfg)))
    state = trainers.replica_specs(state, trainers.num_trainers(cfg))
    return trainers.with_exchange(state, trainers.exchange_specs(state, cfg))


def state_shardings(cfg: Config, mesh: Mesh) -> TrainState:
    """Return the state's NamedShardings.

    With `optimizer.offload`, moments are in host memory; with `optimizer.offload_masters`, the
    trainable parameters too.
    """
    tree = shardings(mesh, state_specs(cfg))
    if not cfg.optimizer.offload:
        return tree
    move = lambda sharding: sharding.with_memory_kind("pinned_host")  # noqa: E731
    if cfg.optimizer.offload_masters:
        trainable, frozen = split(tree.params, specs_of(cfg))
        params = join(jax.tree.map(move, trainable), frozen)
        tree = dataclasses.replace(tree, params=params)
    on_host = lambda _, __, kept: jax.tree.map(move, kept)  # noqa: E731
    opt_state = moments.map_moments(on_host, tree.params, tree.opt_state)
    return dataclasses.replace(tree, opt_state=opt_state)


def logical_shardings(arrays: Any, running: Any, cfg: Config) -> Any:
    """Return the shardings of logical arrays: those of the running state if stages are equal.

    Args:     arrays: a tree like a state or part of one, with shapes. running: its shardings in a
              running state.
    """
    if is_equal(cfg):
        return running

    def one(path, array, sharding):
        return logical_sharding(sharding, array.shape) if _is_layer(path, cfg) else sharding

    return jax.tree_util.tree_map_with_path(one, arrays, running)


def bytes_per_device(state: TrainState) -> int:
    """Return the bytes of one device's shards of a state, including those in host memory.

    Args:     state: arrays, or abstract arrays with shardings.
    """
    shard = lambda a: math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize  # noqa: E731
    return sum(map(shard, jax.tree.leaves(state)))


def init_state(cfg: Config, mesh: Mesh) -> TrainState:
    """Return the initial state. Each device creates only its own shards.

    Parameters depend only on (train.seed, path), so they are equal bit for bit on every mesh.
    """
    params = init_params(specs_of(cfg), cfg, mesh)
    return state_of(params, cfg, mesh)


def init_params(specs: Any, cfg: Config, mesh: Mesh) -> Any:
    """Return initial parameters in running order.

    Args:     specs: those of all of a model's parameters, or of some. A parameter's values do not
              depend on which others are initialized with it.
    """
    to = logical_shardings(abstract(specs), shardings(mesh, partition_specs(specs)), cfg)
    params = init_arrays(specs, cfg.train.seed, to)
    return to_running(TrainState((), params, ()), cfg).params


def state_of(params: Any, cfg: Config, mesh: Mesh) -> TrainState:
    """Return the state at step 0 with the given parameters, in running order."""
    to, replicas = state_shardings(cfg, mesh), trainers.num_trainers(cfg)
    if cfg.optimizer.offload_masters:
        params = jax.device_put(params, to.params)
    own = functools.partial(trainers.for_each, n=replicas)
    opt_state = jax.jit(lambda p: own(init_opt_state(cfg, p)), out_shardings=to.opt_state)
    # Created by a program: device_put would compare the values across processes.
    step = jax.jit(lambda: jnp.int32(0), out_shardings=to.step)()
    kept = initial_extra(params, cfg, mesh)
    kept["guard"] = jax.jit(
        lambda: own(loss_scale.initial_guard(cfg)), out_shardings=to.extra["guard"]
    )()
    state = TrainState(step, params, opt_state(params), kept)
    of_trainers = trainers.start(
        params, replicas, trainers.without_exchange(to).extra.get("diloco")
    )
    state = state.with_extra(diloco=of_trainers)
    return trainers.with_exchange(state, fresh_exchange(params, cfg, mesh))


def fresh_exchange(params: Any, cfg: Config, mesh: Mesh) -> dict[str, Any]:
    """Return what DiLoCo exchanges with an overlap, before it does; {} without."""
    if not trainers.overlap_of(cfg):
        return {}
    to = state_shardings(cfg, mesh).extra["diloco"]
    zeros = jax.jit(
        functools.partial(trainers.nothing_exchanged, cfg=cfg),
        out_shardings={name: to[name] for name in trainers.EXCHANGE},
    )
    return zeros(params)


def initial_extra(params: Any, cfg: Config, mesh: Mesh, names: Container[str] | None = None) -> Any:
    """Return what features keep before the first step, by name.

    Args:     params: in running order.
              names: of those to return. None: all.
    """
    trainable, _ = split(params, specs_of(cfg))
    specs, features = extra_specs(cfg), {f.name: f for f in features_of(cfg)}
    wanted = [name for name in specs if names is None or name in names]

    def start(name: str) -> Any:
        kept = features[name].initial(cfg, trainable)
        return init_params(specs[name], cfg, mesh) if kept is None else kept

    return {name: start(name) for name in wanted}


def fresh_feedback(cfg: Config, mesh: Mesh) -> Any:
    """Return what compressed sums keep before the first step; () without."""
    return init_params(specs, cfg, mesh) if (specs := feedback_of(cfg)) else ()


def averaged(state: TrainState, cfg: Config) -> Any:
    """Return the parameters with the moving average in place of those that are trained, float32."""
    _, frozen = split(state.params, specs_of(cfg))
    full = jnp.dtype(jnp.float32)
    in_full = lambda x: x if x.dtype == full else convert_dtype(x.sharding, full)(x)  # noqa: E731
    return join(jax.tree.map(in_full, state.extra[AVERAGED]), frozen)


def compile_averaged(state: TrainState) -> None:
    """Compile the conversions of `averaged`.

    Args:     state: arrays, or abstract arrays with shardings.
    """
    full = jnp.dtype(jnp.float32)
    for x in jax.tree.leaves(state.extra.get(AVERAGED, ())):
        if x.dtype != full:
            convert_dtype(x.sharding, full).lower(x).compile()  # JAX keeps it for calls


def init_arrays(specs: Any, seed: int, to: Any) -> Any:
    """`initial_values.initialize` with one program per array, compiled in parallel.

    In a single program, XLA would compile the arrays' generators sequentially on one core. The
    operations that create the keys do not depend on the parameters, so JAX compiles them once.
    """
    keys = leaf_keys(specs, seed)
    with ThreadPoolExecutor() as pool:

        def start(spec: ParamSpec, to: NamedSharding, key: jax.Array) -> Future:
            device: Any = to.mesh.devices.flat[0]
            return pool.submit(_initial_values(spec, to, init_options(device.platform)), key)

        return jax.tree.map(Future.result, map_specs(start, specs, to, keys))


@functools.cache
def _initial_values(spec: ParamSpec, sharding: NamedSharding, options: tuple):
    """Return the compiled generator of arrays with this spec."""
    make = functools.partial(initial_values, spec)
    return jax.jit(make, out_shardings=sharding, compiler_options=dict(options))


def to_running(state: TrainState, cfg: Config) -> TrainState:
    """Convert a state from the model's layer order to the order in which the mesh runs layers.

    With unequal stages, the arrays of layers in `state` are deleted one by one, since both forms of
    all arrays would need twice the memory.
    """
    if layer_order(cfg) is None:
        return state
    if is_equal(cfg):
        return _of_layers(lambda x, order: _take(x.sharding, x.ndim)(x, order), state, cfg)

    def consume(x: jax.Array, order: np.ndarray) -> jax.Array:
        converted = to_slots(x, order)
        x.delete()
        return converted

    return _of_layers(consume, state, cfg)


def to_logical(state: TrainState, cfg: Config, *, on_host: bool = False) -> TrainState:
    """Convert a state from the mesh's layer order to the model's, for a checkpoint.

    Args:     on_host: with unequal stages, put the converted arrays in pinned host memory.
    """
    if layer_order(cfg) is None:
        return state
    if is_equal(cfg):
        back = lambda x, order: _take(x.sharding, x.ndim)(x, np.argsort(order))  # noqa: E731
        return _of_layers(back, state, cfg)
    return _of_layers(functools.partial(to_layers, on_host=on_host), state, cfg)


def _of_layers(
    convert: Callable[[jax.Array, np.ndarray], jax.Array], state: TrainState, cfg: Config
) -> TrainState:
    """Convert the layer-stacked arrays of parameters, moments and extra state, given the order of
    each (`order_of`)."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        order = order_of(path, cfg)
        return x if order is None else convert(x, order)

    return jax.tree_util.tree_map_with_path(one, state)


def _is_layer(path: Any, cfg: Config) -> bool:
    """Return whether an array has a row for each slot of the stages."""
    return stack_of(path, cfg) is not None


def snapshot(state: TrainState, cfg: Config) -> TrainState:
    """`to_logical`, with copies of the arrays that are in host memory.

    A reader reads host arrays in place, so a step that donates `state` could overwrite them during
    the read. Readers copy device arrays themselves. With unequal stages, converted arrays are in
    host memory, so that the device needs memory for one of them only.
    """

    def own(new: jax.Array, old: jax.Array) -> jax.Array:
        shared = new is old and new.sharding.memory_kind == "pinned_host"
        return convert_dtype(new.sharding, new.dtype)(new) if shared else new

    return jax.tree.map(own, to_logical(state, cfg, on_host=True), state)


def abstract_snapshot(state: TrainState, cfg: Config, mesh: Mesh) -> TrainState:
    """Return the shapes, dtypes and shardings of `snapshot`."""
    if is_equal(cfg):
        return jax.tree.map(without_values, state)

    def on_host(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        to: Any = x.sharding
        to = to.with_memory_kind("pinned_host") if _is_layer(path, cfg) else to
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)

    return jax.tree_util.tree_map_with_path(on_host, abstract_logical(cfg, mesh))


def without_values(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def compile_snapshot(state: TrainState) -> None:
    """Compile the copies of `snapshot`.

    Those that reorder layers were compiled when the initial or restored state was made.

    Args:     state: arrays, or abstract arrays with shardings.
    """
    for x in jax.tree.leaves(state):
        if x.sharding.memory_kind == "pinned_host":
            convert_dtype(x.sharding, jnp.dtype(x.dtype)).lower(
                x
            ).compile()  # JAX keeps it for calls


@functools.cache
def _take(sharding: Any, ndim: int):
    """Return the compiled reordering of a layer-stacked array, computed on the device."""
    del ndim  # part of the cache key: arrays of several ranks may have the same sharding

    def take(x: jax.Array, order: jax.Array) -> jax.Array:
        return jnp.take(jax.device_put(x, jax.memory.Space.Device), order, axis=0)

    return jax.jit(take, out_shardings=sharding)
