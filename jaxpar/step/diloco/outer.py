"""The outer step: outer weights move towards the mean of the replicas', which start from them anew.

With several fragments, each has its outer steps in turn. With an overlap, an outer step is begun,
exchanged beside inner steps, and applied: `overlap.py`.

Source:   Douillard et al. 2023 (2311.08105), algorithm 1; Douillard et al. 2025 (2501.18512).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.config import Config, present
from jaxpar.sharding.params import flat
from jaxpar.step.diloco import overlap
from jaxpar.step.diloco.fragments import Fragment, mean_of_replicas, nesterov
from jaxpar.step.diloco.overlap import applied, begun, due
from jaxpar.step.diloco.trainers import MOMENTUM, WEIGHTS, overlap_of, tree
from jaxpar.step.state import TrainState, state_shardings, state_specs


class OuterSteps:
    """The programs of the outer steps: one for each fragment, with an overlap three."""

    def __init__(self, cfg: Config, mesh: Mesh):
        self._cfg = cfg
        fragments = range(cfg.diloco.fragments if cfg.diloco else 0)
        self._whole = [make_outer_step(cfg, mesh, i) for i in fragments]
        overlapped = fragments if overlap_of(cfg) else ()
        self._begin = [make_begin(cfg, mesh, i) for i in overlapped]
        self._apply = [make_apply(cfg, mesh, i) for i in overlapped]

    def compile(self, state: TrainState) -> None:
        """Compile the programs for calls with such a state, which may be abstract."""
        for program in (*self._whole, *self._begin, *self._apply):
            program.lower(state.params, state.extra["diloco"]).compile()  # JAX keeps it for calls

    def __call__(self, done: int, state: TrainState) -> TrainState:
        """Take the outer steps that are due after `done` steps. Donates the state if there are any.

        Returns:  the state, which is the same without DiLoCo.
        """
        if not overlap_of(self._cfg) or done == self._cfg.train.num_steps:
            for i in due(done, self._cfg):
                state = self.step(i, state)
            return state
        if (ready := applied(done, self._cfg)) is not None:
            state = self.apply(ready, state)
        if (next_one := begun(done, self._cfg)) is not None:
            state = self.begin(next_one, state)
        return state

    def step(self, fragment: int, state: TrainState) -> TrainState:
        """Take the outer step of a fragment, all at once. Donates the state."""
        return _with(state, *self._whole[fragment](state.params, state.extra["diloco"]))

    def begin(self, fragment: int, state: TrainState) -> TrainState:
        """Begin the outer step of a fragment. Donates what is exchanged."""
        return _with(
            state, state.params, self._begin[fragment](state.params, state.extra["diloco"])
        )

    def apply(self, fragment: int, state: TrainState) -> TrainState:
        """Apply an outer step that has been exchanged. Donates the state."""
        return _with(state, *self._apply[fragment](state.params, state.extra["diloco"]))


def _with(state: TrainState, params: Any, diloco: Any) -> TrainState:
    return dataclasses.replace(state, params=params).with_extra(diloco=diloco)


def make_outer_step(cfg: Config, mesh: Mesh, fragment: int) -> Any:
    """Return the jitted outer step of a fragment: (params, diloco) -> the same, donated."""
    return _jitted(functools.partial(outer_step, cfg, fragment), cfg, mesh)


def make_apply(cfg: Config, mesh: Mesh, fragment: int) -> Any:
    """Return the jitted `overlap.apply`: (params, diloco) -> the same, donated."""
    return _jitted(functools.partial(overlap.apply, cfg, fragment), cfg, mesh)


def make_begin(cfg: Config, mesh: Mesh, fragment: int) -> Any:
    """Return the jitted `overlap.begin`: (params, diloco) -> diloco, donated."""
    specs, to = state_specs(cfg), state_shardings(cfg, mesh)
    begin = jax.shard_map(
        functools.partial(overlap.begin, cfg, fragment),
        mesh=mesh,
        in_specs=(specs.params, specs.extra["diloco"]),
        out_specs=specs.extra["diloco"],
    )
    return jax.jit(begin, donate_argnums=1, out_shardings=to.extra["diloco"])


def make_exchange(cfg: Config, mesh: Mesh, fragment: int) -> Any:
    """Return the jitted `overlap.exchange`: diloco -> the same, donated."""
    specs, to = state_specs(cfg).extra["diloco"], state_shardings(cfg, mesh).extra["diloco"]
    exchange = functools.partial(overlap.exchange, cfg, fragment)
    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=(specs,), out_specs=specs)
    return jax.jit(mapped, donate_argnums=0, out_shardings=to)


def _jitted(step: Callable[..., Any], cfg: Config, mesh: Mesh) -> Any:
    specs, to = state_specs(cfg), state_shardings(cfg, mesh)
    both = specs.params, specs.extra["diloco"]
    mapped = jax.shard_map(step, mesh=mesh, in_specs=both, out_specs=both)
    return jax.jit(mapped, donate_argnums=(0, 1), out_shardings=(to.params, to.extra["diloco"]))


# ------------------------------------------------- inside the shard_map, on local shards


@jax.named_scope("outer_step")
def outer_step(cfg: Config, fragment: int, params: Any, diloco: Any) -> tuple[Any, Any]:
    """Take the outer step of a fragment.

    Args:     params: the outer weights. diloco: as in `trainers.py`, with this replica's weights
              alone.
    Communication: the mean of the fragment's outer gradient over REPLICA, in `diloco.outer_dtype`.
    """
    here, outer = Fragment(cfg, fragment), flat(params)
    momentum, own = flat(diloco[MOMENTUM]), flat(diloco[WEIGHTS])
    for name in here.names:
        before, then = here.part(name, outer[name]), here.part(name, momentum[name])
        gradient = before - here.part(name, own[name][0])
        mean = mean_of_replicas(gradient, present(cfg.diloco).outer_dtype)
        new, then = nesterov(cfg, before, then, mean)
        outer[name] = here.put(name, outer[name], new)
        momentum[name] = here.put(name, momentum[name], then)
        own[name] = here.put(name, own[name][0], new)[None]
    return tree(outer), diloco | {WEIGHTS: tree(own), MOMENTUM: tree(momentum)}
