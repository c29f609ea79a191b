"""What a checkpoint has of each replica, for a run with other replicas or other parts of them.

With another number of DiLoCo's replicas, or of none, all start from the outer weights: those that
each had, up to the last inner step, are not read. Moments and the outer momentum are kept
(`step/diloco/trainers.py`).

Of the errors of compressed sums, what counts is the sum over replicas: the part of the gradients
that no update has had. With another number of replicas, each gets an equal part of it. Errors mean
the same for every method. A parameter without saved errors starts with zero.

An outer gradient of DiLoCo that replicas were exchanging when the checkpoint was saved goes on with
the same bits in a run with the same parts. On another mesh, parts have other elements: the whole
gradient is exchanged before the first step. If the run has another gradient under way at this step,
or the checkpoint has none, the one of the present weights is exchanged instead. Nothing is lost by
that: what replicas have learned since the last outer step is in their weights.
"""

import dataclasses
import functools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.checkpoint.saved import Saved, by_path
from jaxpar.config import Config, replace, value_of
from jaxpar.optimizer import loss_scale
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.sharding.axes import AXES
from jaxpar.sharding.params import flat
from jaxpar.step.conversions import in_configured_dtypes
from jaxpar.step.diloco import outer, overlap, trainers
from jaxpar.step.state import (
    TrainState,
    abstract_logical,
    feedback_of,
    fresh_exchange,
    fresh_feedback,
)


def saved_trainers(saved: Saved) -> int:
    """Return the number of replicas that a checkpoint has weights of; 0 without DiLoCo."""
    then = by_path(saved.config)
    return int(then["parallel.replica"]) if then["diloco.every"] else 0


def abstract_saved(cfg: Config, mesh: Mesh, saved: Saved) -> TrainState:
    """Return the parts of a checkpoint that a run with this config reads, as abstract arrays."""
    if saved_trainers(saved) == trainers.num_trainers(cfg):
        return abstract_logical(cfg, mesh)
    return trainers.saved_replicas(abstract_logical(_plain(cfg), mesh), saved_trainers(saved))


def initial_guard(cfg: Config, saved: Saved) -> Any:
    """Return the guard of a new run, as a checkpoint with these replicas has it."""
    return trainers.for_each(loss_scale.initial_guard(cfg), saved_trainers(saved))


def converted(state: Any, cfg: Config, stored: Config, mesh: Mesh, saved: Saved) -> TrainState:
    """Return a state with the replicas and the dtypes of a config.

    Args:     state: as `abstract_saved` describes it. stored: the config, with the saved dtypes.
    """
    then, now = saved_trainers(saved), trainers.num_trainers(cfg)
    if then == now:
        return in_configured_dtypes(state, abstract_logical(cfg, mesh), cfg)
    what = f"{now} replicas start" if now else "the run without DiLoCo starts"
    of = f"the outer weights of {then} replicas" if then else "its weights"
    peers.log(f"diloco     {what} from {saved}, with {of}")
    if then:  # moments in 8 bits have no dim of replicas
        state = _converted_replicas(state, then, now, stored, mesh)
        return in_configured_dtypes(state, abstract_logical(cfg, mesh), cfg)
    state = in_configured_dtypes(state, abstract_logical(_plain(cfg), mesh), cfg)
    return _converted_replicas(state, then, now, cfg, mesh)


def _converted_replicas(state: Any, then: int, now: int, cfg: Config, mesh: Mesh) -> TrainState:
    shardings = lambda tree: jax.tree.map(lambda a: a.sharding, tree)  # noqa: E731
    to = trainers.without_exchange(shardings(abstract_logical(cfg, mesh)))
    # What begins anew is not in the state yet.
    own = ("guard", "diloco")
    others = {n: shardings(kept) for n, kept in state.extra.items() if n not in own}
    to = dataclasses.replace(to, extra={n: to.extra[n] for n in own if n in to.extra} | others)
    return trainers.with_replicas(state, then, now, to)


def _plain(cfg: Config) -> Config:
    return replace(cfg, diloco=None)


PREFIX = "feedback/"


def has_feedback(saved: Saved) -> bool:
    """Whether a checkpoint has errors."""
    return any(name.startswith(PREFIX) for name in saved.fingerprints)


def feedback_to_load(wanted: Any, saved: Saved, cfg: Config) -> dict[str, Any]:
    """Return what to load of a checkpoint's feedback, for `adapted`; {} if there is nothing to use.

    Args:     wanted: feedback of a logical state, abstract arrays with shardings; () without.
    Returns:  a part of `wanted`, in which errors have the saved number of replicas.
    """
    then, found = by_path(saved.config), {}
    for name, array in flat(wanted or {}).items():
        if PREFIX + name in saved.fingerprints:
            replicas = then["parallel.replica"]
            found[name] = _with_replicas(array, _dims(cfg)[name], replicas)
    return _tree(found)


def adapted(loaded: Any, wanted: Any, saved: Saved, cfg: Config) -> Any:
    """Return loaded errors for this number of replicas; () if nothing was loaded.

    Args:     loaded: arrays of `feedback_to_load`. wanted: as there.
    """
    if has_feedback(saved) and not wanted:
        log(f"the errors of compressed sums in {saved} are dropped: the run keeps none")
    dims, to, found = _dims(cfg), flat(wanted or {}), flat(loaded)
    then, now = by_path(saved.config)["parallel.replica"], cfg.parallel.replica
    if found and then != now:
        log(f"the errors of {then} replicas in {saved} are shared out over {now}")
    if missing := to.keys() - found.keys():
        log(f"errors of compressed sums start anew for {len(missing)} arrays: {saved} has none")
    for name in found:
        if then != now:
            found[name] = _sharing(dims[name], now, to[name].sharding)(found[name])
    return _tree(found) or ()


def with_feedback(found: Any, cfg: Config, mesh: Mesh) -> Any:
    """Add initial values of what was not loaded. Args:     found: in running order; () if none."""
    specs = feedback_of(cfg)
    if not specs or flat(found or {}).keys() == flat(specs).keys():
        return found
    return _tree(flat(fresh_feedback(cfg, mesh)) | flat(found or {}))


def _dims(cfg: Config) -> dict[str, int]:
    """Return the dim of replicas of each array of errors."""
    specs = flat(feedback_of(cfg) or {})
    return {name: spec.axes.index("replica") for name, spec in specs.items()}


def _with_replicas(array: Any, dim: int, replicas: int) -> jax.ShapeDtypeStruct:
    """Change the size of a dim, which is whole on each device if its axes do not divide it."""
    if array.shape[dim] == replicas:
        return array
    shape = (*array.shape[:dim], replicas, *array.shape[dim + 1 :])
    to = array.sharding
    whole = PartitionSpec(*to.spec[:dim], None, *to.spec[dim + 1 :])
    try:
        to.shard_shape(shape)
    except ValueError:
        to = NamedSharding(to.mesh, whole, memory_kind=to.memory_kind)
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=to)


@functools.cache
def _sharing(dim: int, replicas: int, to: NamedSharding) -> Any:
    """Return a compiled function that gives each replica an equal part of the sum of errors."""

    def share(errors: jax.Array) -> jax.Array:
        mean = jnp.sum(errors, axis=dim, keepdims=True) / replicas
        return jnp.repeat(mean, replicas, axis=dim)

    return jax.jit(share, out_shardings=to)


def _tree(arrays: dict[str, Any]) -> dict[str, Any]:
    return flax.traverse_util.unflatten_dict(arrays, sep="/")


#: Fields that decide which elements a part has.
OF_PARTS = ("diloco.overlap", *(f"parallel.{axis}" for axis in AXES))

#: Fields that decide which gradient is under way.
SCHEDULE = ("train.num_steps", "diloco.every", "diloco.fragments", "diloco.overlap")


def exchange_to_load(diloco: Any, saved: Saved, cfg: Config) -> tuple[Any, bool]:
    """Return the part of a state's `diloco` to load, and whether the checkpoint has more.

    Args:     diloco: of a logical state, abstract arrays with shardings; () without.
    """
    of_exchange = tuple(f"diloco/{part}/" for part in trainers.EXCHANGE)
    has_any = any(name.startswith(of_exchange) for name in saved.fingerprints)
    if trainers.OUTGOING not in diloco:
        return diloco, has_any
    if has_any and _is_wanted(saved, cfg):
        return diloco, False
    return {k: v for k, v in diloco.items() if k not in trainers.EXCHANGE}, has_any


def with_exchange(state: TrainState, saved: Saved, cfg: Config, mesh: Mesh) -> TrainState:
    """Return a loaded state with what a run exchanges.

    Communication: if parts have other elements, the mean of a fragment's outer gradient.
    """
    if not trainers.overlap_of(cfg):
        return state
    loaded = trainers.OUTGOING in state.extra["diloco"]
    if not loaded:
        state = trainers.with_exchange(state, fresh_exchange(state.params, cfg, mesh))
    fragment, then = overlap.under_way(saved.step, cfg), by_path(saved.config)
    same_parts = all(then.get(path) == value_of(cfg, path) for path in OF_PARTS)
    if fragment is None or (loaded and same_parts):
        return state
    diloco = state.extra["diloco"]
    if loaded:
        log(
            f"diloco     the exchange of fragment {fragment} ends at once: its parts are others now"
        )
    else:
        log(f"diloco     fragment {fragment} is exchanged at once, as its replicas have it now")
        diloco = outer.make_begin(cfg, mesh, fragment)(state.params, diloco)
    diloco = outer.make_exchange(cfg, mesh, fragment)(diloco)
    return state.with_extra(diloco=diloco)


def _is_wanted(saved: Saved, cfg: Config) -> bool:
    """Whether a checkpoint has the gradient that the run has under way, or the run has none."""
    then = by_path(saved.config)
    if then["diloco.fragments"] != value_of(cfg, "diloco.fragments"):
        return False  # of other shapes
    before = replace(cfg, **{path: then[path] for path in SCHEDULE})
    found = overlap.under_way(saved.step, before)
    return found == overlap.under_way(saved.step, cfg)
