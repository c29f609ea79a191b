"""The errors of compressed sums over replicas, in a checkpoint of other replicas or another method.

What counts is the sum of errors over replicas: the part of the gradients that no update has had.
With another number of replicas, each gets an equal part of it. Errors mean the same for every
method. A parameter without saved errors starts with zero.
"""

import functools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.checkpoint.saved import Saved, by_path
from jaxpar.config import Config
from jaxpar.runtime.processes.peers import log
from jaxpar.sharding.params import flat
from jaxpar.step.state import feedback_of, fresh_feedback

PREFIX = "feedback/"


def has_feedback(saved: Saved) -> bool:
    """Whether a checkpoint has errors."""
    return any(name.startswith(PREFIX) for name in saved.fingerprints)


def to_load(wanted: Any, saved: Saved, cfg: Config) -> dict[str, Any]:
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

    Args:     loaded: arrays of `to_load`. wanted: as there.
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


def completed(found: Any, cfg: Config, mesh: Mesh) -> Any:
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
