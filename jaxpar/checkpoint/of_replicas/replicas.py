"""Restores a checkpoint with another number of DiLoCo's replicas, or of none.

All replicas start from the outer weights: those that each had, up to the last inner step, are not
read. Moments and the outer momentum are kept (`step/diloco/trainers.py`).
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.checkpoint.saved import Saved, by_path
from jaxpar.config import Config, DilocoConfig, replace
from jaxpar.optimizer import loss_scale
from jaxpar.runtime.processes import peers
from jaxpar.step.conversions import in_configured_dtypes
from jaxpar.step.diloco import overlap, trainers
from jaxpar.step.state import TrainState, abstract_logical


def saved_trainers(saved: Saved) -> int:
    """Return the number of replicas that a checkpoint has weights of; 0 without DiLoCo."""
    then = by_path(saved.config)
    return int(then["parallel.replica"]) if then.get("diloco.every", 0) else 0


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
        state = _with_replicas(state, then, now, stored, mesh)
        return in_configured_dtypes(state, abstract_logical(cfg, mesh), cfg)
    state = in_configured_dtypes(state, abstract_logical(_plain(cfg), mesh), cfg)
    return _with_replicas(state, then, now, cfg, mesh)


def _with_replicas(state: Any, then: int, now: int, cfg: Config, mesh: Mesh) -> TrainState:
    shardings = lambda tree: jax.tree.map(lambda a: a.sharding, tree)  # noqa: E731
    to = overlap.without_exchange(shardings(abstract_logical(cfg, mesh)))
    # What begins anew is not in the state yet.
    own = ("guard", "diloco")
    others = {n: shardings(kept) for n, kept in state.extra.items() if n not in own}
    to = dataclasses.replace(to, extra={n: to.extra[n] for n in own if n in to.extra} | others)
    return trainers.with_replicas(state, then, now, to)


def _plain(cfg: Config) -> Config:
    return replace(cfg, diloco=DilocoConfig())
