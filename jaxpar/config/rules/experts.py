"""Rules about a mixture of experts: its sizes, its router and what balances it."""

import functools
import operator
from typing import cast

from jaxpar.components.experts import Experts, experts_in
from jaxpar.components.model import Layer
from jaxpar.components.ranges import Needs
from jaxpar.config import Config, Model, default_of, flag, require, value_of
from jaxpar.config.fields import annotation_of, leaf_paths, refused
from jaxpar.config.layout.placement import expert_ways
from jaxpar.config.lists.recorded_steps import MAX_BYTES, MAX_STEPS, bytes_of_a_step

#: Fields of runs that only a model with experts reads.
OF_RUNS = """train.balance_loss train.balance_over train.router_z_loss parallel.expert_dispatch
parallel.expert_tensor run.record_routing""".split()


def experts(cfg: Config) -> None:
    """Check a mixture of experts, and that no option that it does not support is set."""
    if not experts_in(cfg.model):
        for path in (*OF_RUNS, *_needing()):
            _needs(cfg, path, "needs experts, but no layer has any")
        return
    _placement(cfg)
    path, axis = "parallel.expert_dispatch", "parallel.expert"
    if expert_ways(cfg.parallel) == 1:
        _needs(cfg, path, f"needs an expert axis, but {axis} is 1", flag(axis, 2))
    _router_gradient(cfg)
    _balance(cfg)
    _recording(cfg)


def _placement(cfg: Config) -> None:
    """Check how many tensor ranks split an expert."""
    path, p = "parallel.expert_tensor", cfg.parallel
    rule = f"must be 0 or parallel.tensor = {p.tensor} (all tensor ranks), or 1 (whole experts)"
    require(p.expert_tensor in (0, 1, p.tensor), cfg, path, rule, flag(path, 0), flag(path, 1))


def _needs(cfg: Config, path: str, rule: str, *ways: str) -> None:
    """Check that a field has its default, since what it needs is not there."""
    default = default_of(path)
    require(value_of(cfg, path) == default, cfg, path, rule, flag(path, default), *ways)


def _router_gradient(cfg: Config) -> None:
    # p / p is 1 whatever the router computes: AdamW would turn rounding noise into updates.
    layer = without_router_gradient(cfg.model)
    if layer is None:
        return
    of = cast(Experts, layer.feed_forward)
    where = f"model.{layer.name}.feed_forward"
    path = f"{where}.experts_per_token"
    off: tuple[str, bool | str]
    if of.router.normalize:
        off = f"{where}.router.normalize", False
        why = f"{off[0]} sets its only weight to 1"
    else:
        off = f"model.{layer.name}.norms", "before"
        why = "the norm after the experts cancels its only weight"
    rule = f"leaves the router without a gradient: {why}"
    raise refused(path, of.experts_per_token, rule, flag(*off), flag(path, 2))


def without_router_gradient(m: Model) -> Layer | None:
    """Return a layer whose tokens use one of several experts with a weight of 1, or with a weight
    that a norm cancels up to its eps. (With a single expert, the gradient is exactly 0.)"""
    for layer in m.distinct:
        of = layer.feed_forward
        if isinstance(of, Experts) and of.num_experts > 1 and of.experts_per_token == 1:
            cancels = layer.norms != "before" and not of.num_shared_experts
            if of.router.normalize or cancels:
                return layer
    return None


def _balance(cfg: Config) -> None:
    path, loss = "train.balance_over", "train.balance_loss"
    if cfg.train.balance_loss == 0:
        _needs(cfg, path, f"needs a balance loss, but {loss} is 0", flag(loss, 1e-3))
    layers = [one for one in cfg.model.distinct if isinstance(one.feed_forward, Experts)]
    for path, part in _needing().items():
        if not any(map(operator.attrgetter(part), layers)):
            parts = [f"model.{layer.name}.{part}" for layer in layers]
            on = " ".join(flag(name, True) for name in parts)
            _needs(cfg, path, f"needs {parts[0]}, which is False", on)


@functools.cache
def _needing() -> dict[str, str]:
    """Return the fields that need a part of layers with experts: path -> part."""
    marks = {path: getattr(annotation_of(path), "__metadata__", ()) for path in leaf_paths()}
    return {path: m.part for path, of in marks.items() for m in of if isinstance(m, Needs)}


def _recording(cfg: Config) -> None:
    """Check the steps whose routing is recorded, and the size of their files."""
    path, last = "run.record_routing", cfg.train.num_steps
    steps = cfg.run.record_routing
    if not steps:
        return
    rule = f"must name steps of the run, from 1 to train.num_steps = {last}"
    ways = flag(path, (last,)), flag("train.num_steps", max(steps))
    require(max(steps) <= last, cfg, path, rule, *ways)
    kinds = {(one.num_experts, one.experts_per_token) for one in experts_in(cfg.model)}
    rule = "needs layers with equal numbers of experts, and of experts per token"
    require(len(kinds) == 1, cfg, path, rule, flag(path, ()))
    shown, size = steps[: MAX_STEPS // 10], bytes_of_a_step(cfg)
    rule = f"names {len(steps)} steps, and must name at most {MAX_STEPS}"
    require(len(steps) <= MAX_STEPS, cfg, path, rule, flag(path, shown))
    rule = f"records {len(steps)} steps of {size:,} bytes, and must record at most {MAX_BYTES:,}"
    fits = steps[: MAX_BYTES // size]
    require(len(steps) * size <= MAX_BYTES, cfg, path, rule, flag(path, fits))
