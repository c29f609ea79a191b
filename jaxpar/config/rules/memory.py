"""Rules about memory: rematerialization and the storage of the moments."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

from jaxpar.components.experts import experts_in
from jaxpar.config import Config, RematSlice, flag, require, value_of
from jaxpar.config.fields import refused
from jaxpar.config.layout.layer_split import slots_per_chunk
from jaxpar.config.layout.moment_blocks import (
    EIGHT_BITS,
    SMALLEST,
    block_of,
    split_sizes,
    uses_blocks,
)
from jaxpar.config.remat_policies import (
    EXPERT_NAMES,
    LAYER_INPUT,
    ON_HOST,
)
from jaxpar.config.rules.divisibility import largest_divisor
from jaxpar.config.schema.items import Remat, RematValue


def remat(cfg: Config) -> None:
    """Check the values that policies save, which layers they are for, and groups of layers."""
    p, path = cfg.parallel, "parallel.remat"
    _policy(cfg, path, p.remat, lambda policy: flag(path, policy))
    slices = p.remat_layers
    for i, one in enumerate(slices):
        with_policy = functools.partial(_with_policy, slices, i)
        _policy(cfg, f"parallel.remat_layers[{i}].policy", one.policy, with_policy)
    _groups(cfg)


def _with_policy(slices: tuple[RematSlice, ...], at: int, policy: Remat) -> str:
    changed = dataclasses.replace(slices[at], policy=policy)
    return flag("parallel.remat_layers", (*slices[:at], changed, *slices[at + 1 :]))


def _groups(cfg: Config) -> None:
    """Check that groups of layers divide the layers of a loop."""
    p, path = cfg.parallel, "parallel.remat_group"
    if p.remat_group == 1:
        return
    layers = slots_per_chunk(cfg)
    rule = f"must divide the {layers} layers of a loop"
    fix = flag(path, largest_divisor(layers, max(math.isqrt(layers), 1)))
    require(layers % p.remat_group == 0, cfg, path, rule, fix)


def _policy(cfg: Config, path: str, policy: Remat, way: Callable[[Remat], str]) -> None:
    """Check the values that one policy saves.

    Args:     way: a policy -> the option that sets it.
    """
    if isinstance(policy, str):
        return
    if not policy:
        raise refused(path, policy, "must be a policy, or name values to save", way("dots"))

    def need(rule: str, others: Iterable[RematValue], *ways: str) -> None:
        changed = tuple(others)
        if changed != policy:
            raise refused(path, policy, rule, way(changed or "full"), *ways)

    moved = lambda one, on: dataclasses.replace(one, on=on)  # noqa: E731
    once = {one.name: one for one in policy}
    need("must name each value once, on the device or in host memory", once.values())
    rule = f"always saves {LAYER_INPUT}; add {ON_HOST} to save it in host memory"
    need(rule, (moved(one, "host") if one.name == LAYER_INPUT else one for one in policy))
    of_experts = [one for one in policy if one.name in EXPERT_NAMES]
    if not experts_in(cfg.model):
        rule = f"names {', '.join(one.name for one in of_experts)}, which only experts have"
        need(rule, (one for one in policy if one not in of_experts))
    rule = f"saves what experts receive or multiply on the device only, without {ON_HOST}"
    need(rule, (moved(one, "device") if one in of_experts else one for one in policy))
    rule = "saves moe_weights, of which a pipeline would keep a copy with each microbatch"
    if cfg.parallel.pipeline > 1:
        others = (one for one in policy if one.name != "moe_weights")
        need(rule, others, flag("parallel.pipeline", 1))


#: Largest decay at which stochastic rounding to bfloat16 is accurate (docs/numerics.md).
MAX_BFLOAT16_DECAY = 0.999


def moments(cfg: Config) -> None:
    """Check that moments in bfloat16 exist and that their rounding error stays small."""
    o, first, second = (
        cfg.optimizer,
        "optimizer.first_moment_dtype",
        "optimizer.second_moment_dtype",
    )
    rule = f"needs adamw or muon; {o.name} has no second moment"
    ways = flag(second, "float32"), flag("optimizer.name", "adamw")
    has_second = o.name in ("adamw", "muon")
    require(o.second_moment_dtype == "float32" or has_second, cfg, second, rule, *ways)
    # Lion's only moment decays by beta2; beta1 interpolates between it and the gradient.
    betas = [(first, "optimizer.beta2" if o.name == "lion" else "optimizer.beta1")]
    betas += [(first, "optimizer.muon_momentum")] * (o.name == "muon")
    betas += [(second, "optimizer.beta2")]
    for path, beta in betas:
        decay, most = value_of(cfg, beta), MAX_BFLOAT16_DECAY
        rule = f"needs {beta} <= {most}, not {decay}: rounding noise would exceed 5%"
        ok = value_of(cfg, path) != "bfloat16" or decay <= most
        require(ok, cfg, path, rule, flag(path, "float32"), flag(beta, most))


def blocks_of_moments(cfg: Config) -> None:
    """Check that a rule can have moments in 8 bits, and that blocks lie inside shards.

    Other blocks are along dims that no mesh splits (`optimizer/blockwise.py`).
    """
    o, m, path = cfg.optimizer, cfg.model, "optimizer.moment_block"
    for field in ("optimizer.first_moment_dtype", "optimizer.second_moment_dtype"):
        ok = value_of(cfg, field) != EIGHT_BITS or o.name in ("adamw", "lion")
        rule = f"is for adamw and lion, not {o.name}"
        require(ok, cfg, field, rule, flag(field, "float32"), flag("optimizer.name", "adamw"))
    if not uses_blocks(o):
        return
    for name, size, axes in split_sizes(m, cfg.parallel):
        ways = math.prod(max(value_of(cfg, axis), 1) for axis in axes)
        fits = lambda n: size % (max(block_of(size, n), 1) * ways) == 0  # noqa: B023, E731
        factors = " * ".join(axis for axis in axes if value_of(cfg, axis) > 1)
        rule = f"gives blocks of {block_of(size, o.moment_block)} of the {size} elements of {name},"
        rule += f" which {factors} = {ways} would split"
        sizes = range(o.moment_block, SMALLEST - 1, -1)
        smaller = next((n for n in sizes if size % (n * ways) == 0), None)
        fixes = [flag(path, smaller)] if smaller else []
        fixes += [flag("optimizer.first_moment_dtype", "bfloat16")]
        require(fits(o.moment_block), cfg, path, rule, *fixes)


def offloaded_masters(cfg: Config) -> None:
    """Check that master weights are in host memory with the moments."""
    path, o = "optimizer.offload_masters", cfg.optimizer
    if not o.offload_masters:
        return
    off, together = flag(path, False), flag("optimizer.offload", True)
    rule = "updates masters and moments together, so the moments must be in host memory"
    require(o.offload, cfg, path, rule, together, off)
