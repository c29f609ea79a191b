"""An outer gradient of DiLoCo that replicas were exchanging when a checkpoint was saved.

The run that continues with the same parts exchanges the rest of them, with the same bits. On
another mesh, parts have other elements: the whole gradient is exchanged before the first step. If
the run has another gradient under way at this step, or the checkpoint has none, the one of the
present weights is exchanged instead. Nothing is lost by that: what replicas have learned since the
last outer step is in their weights.
"""

from typing import Any

from jax.sharding import Mesh

from jaxpar.checkpoint.saved import Saved, by_path
from jaxpar.config import Config, replace, value_of
from jaxpar.runtime.processes.peers import log
from jaxpar.sharding.axes import AXES
from jaxpar.step.diloco import outer, overlap, schedule
from jaxpar.step.state import TrainState, fresh_exchange

#: Fields that decide which elements a part has.
PARTS = ("diloco.overlap", *(f"parallel.{axis}" for axis in AXES))

#: Fields that decide which gradient is under way.
SCHEDULE = ("train.num_steps", "diloco.every", "diloco.fragments", "diloco.overlap")


def to_load(diloco: Any, saved: Saved, cfg: Config) -> tuple[Any, bool]:
    """Return the part of a state's `diloco` to load, and whether the checkpoint has more.

    Args:     diloco: of a logical state, abstract arrays with shardings; () without.
    """
    has_any = any(_is_exchange(name) for name in saved.fingerprints)
    if overlap.OUTGOING not in diloco:
        return diloco, has_any
    if has_any and _is_wanted(saved, cfg):
        return diloco, False
    return {k: v for k, v in diloco.items() if k not in overlap.EXCHANGE}, has_any


def completed(state: TrainState, saved: Saved, cfg: Config, mesh: Mesh) -> TrainState:
    """Return a loaded state with what a run exchanges.

    Communication: if parts have other elements, the mean of a fragment's outer gradient.
    """
    if not cfg.diloco.overlap:
        return state
    loaded = overlap.OUTGOING in state.extra["diloco"]
    if not loaded:
        state = overlap.with_exchange(state, fresh_exchange(state.params, cfg, mesh))
    fragment, then = schedule.under_way(saved.step, cfg), by_path(saved.config)
    same_parts = all(then.get(path) == value_of(cfg, path) for path in PARTS)
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
    if then.get("diloco.fragments") != cfg.diloco.fragments:
        return False  # of other shapes
    before = replace(cfg, **{path: then[path] for path in SCHEDULE})
    found = schedule.under_way(saved.step, before)
    return found == schedule.under_way(saved.step, cfg)


def _is_exchange(name: str) -> bool:
    return name.startswith(tuple(f"diloco/{part}/" for part in overlap.EXCHANGE))
