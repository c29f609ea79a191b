"""The training state with DiLoCo: outer weights, and what each replica has of its own.

    params              the outer weights, as without DiLoCo: what is evaluated and exported
    opt_state, guard    [R, ...]: those of each replica, split over REPLICA
    diloco.weights      [R, ...]: the weights of each replica, split over REPLICA
    diloco.momentum     the momentum of the outer step, sharded as the outer weights

With an overlap of outer and inner steps (`overlap.py`), also what is under way; outside of an
exchange, both are unused. Stacks of layers have a fragment's L/n layers:

    diloco.outgoing     [R, ...]: each replica's outer gradient of a fragment, split over REPLICA
    diloco.arrived      its mean over REPLICA, as far as it has been exchanged

R is the size of REPLICA. Outer weights and momentum are replicated over it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.config import Config, present
from jaxpar.model.parameters import specs_of
from jaxpar.sharding.axes import REPLICA
from jaxpar.sharding.params import flat

WEIGHTS, MOMENTUM = "weights", "momentum"
EXCHANGE = OUTGOING, ARRIVED = "outgoing", "arrived"


def num_trainers(cfg: Config) -> int:
    """Return the number of replicas that train on their own; 0 without DiLoCo."""
    return cfg.parallel.replica if cfg.diloco else 0


def overlap_of(cfg: Config) -> int:
    """Return the inner steps during which a gradient is exchanged; 0 without an overlap."""
    return cfg.diloco.overlap if cfg.diloco else 0


def trainer_axes(cfg: Config, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of some mesh axes over which a trainer sums: all, or all but REPLICA."""
    return tuple(axis for axis in axes if axis != REPLICA) if num_trainers(cfg) else axes


def for_each(tree: Any, n: int) -> Any:
    """Return arrays with a leading dim of n replicas, of which all have the same; 0: as they are.

    Args:     tree: arrays, or abstract ones.
    """

    def of(a: Any) -> Any:
        shape = n, *a.shape
        if isinstance(a, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, a.dtype)
        return jnp.broadcast_to(a, shape)

    return jax.tree.map(of, tree) if n else tree


def abstract_replicas(state: Any, n: int) -> Any:
    """Return an abstract TrainState with n replicas, from one without DiLoCo."""
    return _replicated(lambda tree: for_each(tree, n), state) if n else state


def replica_specs(state: Any, n: int) -> Any:
    """Return the PartitionSpecs of a TrainState with n replicas, from those without DiLoCo."""
    is_leaf = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    of = lambda spec: PartitionSpec(REPLICA, *spec)  # noqa: E731
    return _replicated(lambda tree: jax.tree.map(of, tree, is_leaf=is_leaf), state) if n else state


def _replicated(each: Callable[[Any], Any], state: Any) -> Any:
    return dataclasses.replace(
        state,
        opt_state=each(state.opt_state),
    ).with_extra(
        guard=each(state.extra["guard"]),
        diloco={WEIGHTS: each(state.params), MOMENTUM: state.params},
    )


def start(params: Any, n: int, to: Any) -> Any:
    """Return the weights of n replicas that start from the outer weights, and no momentum.

    Args:     to: the shardings of the result. n: 0 without DiLoCo, then ().
    """
    if not n:
        return ()
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)  # noqa: E731
    make = lambda tree: {WEIGHTS: for_each(tree, n), MOMENTUM: zeros(tree)}  # noqa: E731
    return jax.jit(make, out_shardings=to)(params)


def with_replicas(state: Any, then: int, now: int, to: Any) -> Any:
    """Return a TrainState for another number of replicas, which start from the outer weights.

    Replica r gets the moments of the former replica r modulo their number. The momentum of the
    outer step is kept.

    Args:     state: a TrainState with `then` replicas, without `diloco.weights`. The memory of its
              parameters is donated. then, now: 0
              without DiLoCo. to: the shardings of the result, a TrainState.
    """

    def own(a: jax.Array) -> jax.Array:
        if not then:
            return jnp.broadcast_to(a, (now, *a.shape))
        return a[jnp.arange(now) % then] if now else a[0]

    def convert(params: Any, state: Any) -> Any:
        moments, guard = jax.tree.map(own, (state.opt_state, state.extra["guard"]))
        new = dataclasses.replace(state, params=params, opt_state=moments)
        new = new.with_extra(guard=guard, diloco=())
        if not now:
            return new
        old = state.extra["diloco"][MOMENTUM] if then else jax.tree.map(jnp.zeros_like, params)
        return new.with_extra(diloco={WEIGHTS: for_each(params, now), MOMENTUM: old})

    rest = dataclasses.replace(state, params=())
    return jax.jit(convert, out_shardings=to, donate_argnums=0)(state.params, rest)


def saved_replicas(state: Any, n: int) -> Any:
    """Return what `with_replicas` needs of a checkpoint with n replicas, as abstract arrays.

    Args:     state: an abstract TrainState without DiLoCo, with shardings on the mesh to load on. A
              number of replicas that does not divide over REPLICA is loaded whole on each device.
    """
    if not n:
        return state

    def own(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        to: Any = a.sharding
        ways = to.mesh.shape[REPLICA]
        spec = PartitionSpec(REPLICA if n % ways == 0 else None, *to.spec)
        sharding = NamedSharding(to.mesh, spec)
        return jax.ShapeDtypeStruct((n, *a.shape), a.dtype, sharding=sharding)

    moments, guard = jax.tree.map(own, (state.opt_state, state.extra["guard"]))
    diloco = {MOMENTUM: state.params}
    return dataclasses.replace(state, opt_state=moments).with_extra(guard=guard, diloco=diloco)


def nothing_exchanged(params: Any, cfg: Config) -> dict[str, Any]:
    """Return zeros in the places of `outgoing` and `arrived`; {} without an overlap.

    Args:     params: all parameters.
    """
    if not overlap_of(cfg):
        return {}
    specs, n = flat(specs_of(cfg)), present(cfg.diloco).fragments

    def zeros(name: str, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x[: x.shape[0] // n] if is_layers(specs[name]) else x)

    parts = tree({name: zeros(name, x) for name, x in flat(params).items()})
    return {OUTGOING: for_each(parts, num_trainers(cfg)), ARRIVED: parts}


def with_exchange(state: Any, exchange: dict[str, Any]) -> Any:
    """Return a TrainState with other values, shapes or shardings of what is exchanged."""
    return state.with_extra(diloco=state.extra["diloco"] | exchange) if exchange else state


def without_exchange(state: Any) -> Any:
    """Return a TrainState without what is exchanged."""
    if "diloco" not in state.extra:
        return state
    others = {n: x for n, x in state.extra["diloco"].items() if n not in EXCHANGE}
    return state.with_extra(diloco=others)


def exchange_specs(specs: Any, cfg: Config) -> dict[str, Any]:
    """Return the PartitionSpecs of what is exchanged: those of the weights.

    Args:     specs: those of a TrainState with DiLoCo.
    """
    if not overlap_of(cfg):
        return {}
    return {OUTGOING: specs.extra["diloco"][WEIGHTS], ARRIVED: specs.params}


def is_layers(spec: Any) -> bool:
    """Whether an array is a stack of layers."""
    return spec.axes[0] == "layer"


def tree(leaves: dict[str, Any]) -> Any:
    """Return arrays by name as a tree."""
    return flax.traverse_util.unflatten_dict(leaves, sep="/")
