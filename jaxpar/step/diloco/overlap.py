"""Outer steps beside inner ones: what is exchanged stays the same while replicas train on.

A GPU runs programs one after another, and waits for the collectives of each. So the exchange is no
program of its own: each of the next `diloco.overlap` train steps has a part of it as a collective
that neither its input nor its result needs otherwise, which XLA's scheduler can run beside the
step. The state keeps what is under way (`trainers.py`).

Source:   Douillard et al. 2025 (2501.18512), section 2.3 and algorithm 2.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config, present
from jaxpar.parallel.collectives import varying_axes
from jaxpar.sharding.params import flat
from jaxpar.step.diloco.fragments import Fragment, mean_of_replicas, nesterov
from jaxpar.step.diloco.trainers import (
    ARRIVED,
    MOMENTUM,
    OUTGOING,
    WEIGHTS,
    overlap_of,
    tree,
    with_exchange,
)
from jaxpar.step.metrics import Step

# ------------- When fragments have their outer steps, and with an overlap, when those begin and end
#
# Fragments are due in turn, `every / fragments` inner steps apart. With an overlap of K steps, the
# outer gradient of a fragment that is due after step t is exchanged during steps t + 1 to t + K,
# and applied after the last of them.
#
# Source:   Douillard et al. 2025 (2501.18512), section 2: algorithm 2.


def due(done: int, cfg: Config) -> list[int]:
    """Return the fragments that have an outer step after `done` steps, without an overlap.

    After the last step of the run, all of them do: no inner step is lost.
    """
    d = cfg.diloco
    if d is None:
        return []
    if done == cfg.train.num_steps:
        return list(range(d.fragments))
    return [i for i in range(d.fragments) if (done - i * d.every // d.fragments) % d.every == 0]


def begun(done: int, cfg: Config) -> int | None:
    """Return the fragment whose exchange begins after `done` steps; None if none does.

    None begins that would not be applied before the last step, after which all fragments have an
    outer step.
    """
    d = cfg.diloco
    if d is None or not d.overlap or done + d.overlap >= cfg.train.num_steps:
        return None
    turn, since = divmod(done, spacing(cfg))
    return turn % d.fragments if turn > 0 and not since else None


def under_way(done: int, cfg: Config) -> int | None:
    """Return the fragment whose outer gradient the step after `done` steps exchanges a part of."""
    steps = overlap_of(cfg)
    since = done % spacing(cfg) if steps else 0
    return begun(done - since, cfg) if since < steps else None


def applied(done: int, cfg: Config) -> int | None:
    """Return the fragment whose exchanged gradient is applied after `done` steps; None if none."""
    steps = overlap_of(cfg)
    return begun(done - steps, cfg) if steps else None


def spacing(cfg: Config) -> int:
    """Return the inner steps between the outer steps of two fragments."""
    d = present(cfg.diloco)
    return d.every // d.fragments


# ------------------------------------------------------ What is exchanged, and the programs that do


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
