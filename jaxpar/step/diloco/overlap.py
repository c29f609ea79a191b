"""Outer steps beside inner ones: what is exchanged stays the same while replicas train on.

A GPU runs programs one after another, and waits for the collectives of each. So the exchange is no
program of its own: each of the next `diloco.overlap` train steps has a part of it as a collective
that neither its input nor its result needs otherwise, which XLA's scheduler can run beside the
step. `schedule.py` says when; the state keeps what is under way:

    diloco.outgoing     [R, ...]: each replica's outer gradient of a fragment, split over REPLICA
    diloco.arrived      its mean over REPLICA, as far as it has been exchanged

Stacks of layers have a fragment's L/n layers. Outside of an exchange, both are unused.

Source:   Douillard et al. 2025 (2501.18512), section 2.3 and algorithm 2.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config, present
from jaxpar.model.parameters import specs_of
from jaxpar.parallel.collectives import varying_axes
from jaxpar.sharding.params import flat
from jaxpar.step.diloco.fragments import Fragment, is_layers, tree
from jaxpar.step.diloco.rule import mean_of_replicas, nesterov
from jaxpar.step.diloco.schedule import overlap_of, spacing
from jaxpar.step.diloco.trainers import MOMENTUM, WEIGHTS, for_each, num_trainers
from jaxpar.step.metrics import Step

EXCHANGE = OUTGOING, ARRIVED = "outgoing", "arrived"


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


def programs_of_steps(cfg: Config) -> list[int | None]:
    """Return `fragment` of the train steps that a run needs: None for one without an exchange.

    Fragments with the same arrays share the program of the first of them.
    """
    if not overlap_of(cfg):
        return [None]
    return [None, *sorted({same_program(cfg, i) for i in range(present(cfg.diloco).fragments)})]


def same_program(cfg: Config, fragment: int) -> int:
    """Return the first fragment that has the same arrays."""
    return fragment if fragment in (0, present(cfg.diloco).fragments - 1) else 1


# ------------------------------------------------- inside the shard_map, on local shards


@jax.named_scope("outer_step")
def begin(cfg: Config, fragment: int, params: Any, diloco: Any) -> Any:
    """Return `diloco` with this replica's outer gradient of a fragment to be exchanged."""
    here, outer, own = Fragment(cfg, fragment), flat(params), flat(diloco[WEIGHTS])
    outgoing = flat(diloco[OUTGOING])
    for name in here.names:
        gradient = here.part(name, outer[name]) - here.part(name, own[name][0])
        outgoing[name] = gradient[None]
    return diloco | {OUTGOING: tree(outgoing)}


@jax.named_scope("outer_step")
def exchange(cfg: Config, fragment: int, diloco: Any) -> Any:
    """Return `diloco` with the whole outer gradient of a fragment exchanged at once.

    Communication: the mean of the fragment's outer gradient over REPLICA, in `diloco.outer_dtype`.
    """
    outgoing, arrived = flat(diloco[OUTGOING]), flat(diloco[ARRIVED])
    for name in Fragment(cfg, fragment).names:
        arrived[name] = mean_of_replicas(outgoing[name][0], present(cfg.diloco).outer_dtype)
    return diloco | {ARRIVED: tree(arrived)}


def beside(step: Step, cfg: Config, fragment: int) -> Step:
    """Return a train step that also exchanges its part of a fragment's outer gradient.

    Args:     step: that of all replicas.
    Communication: a mean over REPLICA of 1 / `diloco.overlap` of the elements, in
              `diloco.outer_dtype`. Nothing in the step waits for it.
    """
    names = Fragment(cfg, fragment).names

    def both(state: Any, *more: Any) -> tuple[Any, Any, Any]:
        diloco = state.extra["diloco"]
        outgoing, arrived = flat(diloco[OUTGOING]), flat(diloco[ARRIVED])
        number = state.step % spacing(cfg)
        with jax.named_scope("outer_step"):
            own = {name: outgoing[name][0] for name in names}
            for alike in _alike(own).values():
                arrived |= _with_parts(cfg, number, alike, arrived)
        new, metrics, records = step(state, *more)
        return with_exchange(new, {ARRIVED: tree(arrived)}), metrics, records

    return both


def _alike(own: dict[str, jax.Array]) -> dict[tuple[str, ...], dict[str, jax.Array]]:
    """Return arrays by the axes that they are split over: those can be sent as one."""
    found: dict[tuple[str, ...], dict[str, jax.Array]] = {}
    for name, x in own.items():
        found.setdefault(varying_axes(x), {})[name] = x
    return found


def _with_parts(
    cfg: Config, number: jax.Array, own: dict[str, jax.Array], arrived: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return what has arrived of some arrays, with the means of one part of their elements.

    The last parts overlap if the elements do not divide: the same means are written again.
    """
    d = present(cfg.diloco)
    sizes = {name: -(-x.size // d.overlap) for name, x in own.items()}
    starts = {name: jnp.minimum(number * n, own[name].size - n) for name, n in sizes.items()}
    parts = [lax.dynamic_slice(x.ravel(), (starts[k],), (sizes[k],)) for k, x in own.items()]
    means = mean_of_replicas(jnp.concatenate(parts), d.outer_dtype)
    ends = list(itertools.accumulate(sizes.values()))
    of = dict(zip(own, jnp.split(means, ends[:-1]), strict=True))
    put = lambda x, mean, start: lax.dynamic_update_slice(x.ravel(), mean, (start,))  # noqa: E731
    return {k: put(arrived[k], of[k], starts[k]).reshape(arrived[k].shape) for k in own}


@jax.named_scope("outer_step")
def apply(cfg: Config, fragment: int, params: Any, diloco: Any) -> tuple[Any, Any]:
    """Take the outer step of a fragment whose gradient has arrived. Sends nothing.

    Each replica has trained on since the exchange began: its weights become a mix of its own and
    the outer ones.
    """
    here, keep, outer = Fragment(cfg, fragment), present(cfg.diloco).mixing, flat(params)
    momentum, own, arrived = (flat(diloco[key]) for key in (MOMENTUM, WEIGHTS, ARRIVED))
    for name in here.names:
        before = here.part(name, outer[name]), here.part(name, momentum[name])
        new, then = nesterov(cfg, *before, arrived[name])
        mixed = keep * here.part(name, own[name][0]) + (1 - keep) * new
        outer[name] = here.put(name, outer[name], new)
        momentum[name] = here.put(name, momentum[name], then)
        own[name] = here.put(name, own[name][0], mixed)[None]
    return tree(outer), diloco | {WEIGHTS: tree(own), MOMENTUM: tree(momentum)}
