"""Rules about DiLoCo: its numbers, and what it is not combined with."""

import dataclasses
from typing import Any

from jaxpar.config import Config, DilocoConfig, default_of, flag, require, value_of
from jaxpar.config.layout.layer_split import is_equal

PATH = "diloco.every"

#: Fields that must have this value, and why.
PLAIN: dict[str, tuple[Any, str]] = {
    "parallel.auto": ("", "lets the planner choose the replicas, which change what is computed"),
    "parallel.replica_reduction": ("float32", "compresses a sum that inner steps do not have"),
    "parallel.virtual_stages": (1, "stores layers in another order"),
    "model.num_experts": (0, "balances its experts over all replicas"),
    "lora.rank": (0, "has frozen weights, which replicas would share"),
    "dpo.beta": (0.0, "has pairs, which are counted over all replicas"),
    "distill.teacher": ("", "has a teacher, which replicas would share"),
    "metrics.layers": ("none", "sums squares of gradients and weights over all replicas"),
    "optimizer.offload": (False, "updates moments layer by layer, without a dim of replicas"),
}

#: Values that a field must not have, what it may have, and why.
REFUSED: dict[str, tuple[str, str, str]] = {
    "compute.dtype": ("float16", "bfloat16", "has a loss scale, which is the same in all replicas"),
    "optimizer.name": ("muon", "adamw", "shares its matrices among all replicas"),
    "optimizer.first_moment_dtype": ("8bit", "bfloat16", "has blocks without a dim of replicas"),
    "optimizer.second_moment_dtype": ("8bit", "bfloat16", "has blocks without a dim of replicas"),
}


def diloco(cfg: Config) -> None:
    """Check the numbers of DiLoCo, and that replicas can train on their own."""
    d = cfg.diloco
    ok, path = d.outer_learning_rate > 0, "diloco.outer_learning_rate"
    require(ok, cfg, path, "must be above 0", flag(path, default_of(path)))
    ok, path = 0 <= d.outer_momentum < 1, "diloco.outer_momentum"
    require(ok, cfg, path, "must be at least 0 and below 1", flag(path, default_of(path)))
    if not d.every:
        _unused(cfg)
        return
    none, path = flag(PATH, 0), "parallel.replica"
    rule = f"must be at least 2 with {PATH} = {d.every}: replicas train on their own"
    require(cfg.parallel.replica > 1, cfg, path, rule, flag(path, 2), none)
    for path, (value, why) in PLAIN.items():
        rule = f"{why}: not supported with {PATH} = {d.every}"
        require(value_of(cfg, path) == value, cfg, path, rule, none, flag(path, value))
    for path, (value, other, why) in REFUSED.items():
        rule = f"{why}: not supported with {PATH} = {d.every}"
        require(value_of(cfg, path) != value, cfg, path, rule, flag(path, other), none)
    path, rule = "model.num_layers", "must be a multiple of parallel.pipeline = "
    rule += f"{cfg.parallel.pipeline} with {PATH} = {d.every}"
    require(is_equal(cfg), cfg, path, rule, flag("parallel.pipeline", 1), none)
    _fragments(cfg)
    _overlap(cfg)


def _unused(cfg: Config) -> None:
    """Check that no field is set in vain."""
    for field in dataclasses.fields(DilocoConfig):
        path = f"diloco.{field.name}"
        rule = f"has no effect, because {PATH} is 0"
        ways = flag(PATH, 50), flag(path, default_of(path))
        require(value_of(cfg, path) == default_of(path), cfg, path, rule, *ways)


def _fragments(cfg: Config) -> None:
    """Check that fragments have whole steps between them, and as many layers each."""
    n, path, whole = cfg.diloco.fragments, "diloco.fragments", flag("diloco.fragments", 1)
    rule = f"must divide {PATH} = {cfg.diloco.every}"
    require(cfg.diloco.every % n == 0, cfg, path, rule, whole, flag(PATH, n))
    for other, value in {"model.layer_pattern": "", "model.dense_layers": 0}.items():
        rule = f"must be 1 with {other} = {value_of(cfg, other)!r}: layers are in several stacks"
        require(n == 1 or value_of(cfg, other) == value, cfg, path, rule, whole)
    here = cfg.model.num_layers // cfg.parallel.pipeline
    rule = f"must divide the {here} layers of a stage"
    fits = [k for k in range(n, 0, -1) if here % k == 0 and cfg.diloco.every % k == 0]
    require(here % n == 0, cfg, path, rule, *(flag(path, k) for k in fits[:1]))


def _overlap(cfg: Config) -> None:
    """Check that an exchange ends before the next one begins, and that its share is one."""
    d, path = cfg.diloco, "diloco.overlap"
    most = d.every // d.fragments
    rule = f"must be at most {most}, the steps from a fragment's outer step to the next one's"
    ways = [flag("diloco.fragments", 1)] if d.overlap <= d.every else []
    require(d.overlap <= most, cfg, path, rule, flag(path, most), *ways)
    path = "diloco.mixing"
    require(0 <= d.mixing < 1, cfg, path, "must be at least 0 and below 1", flag(path, 0.5))
    rule = "has no effect, because diloco.overlap is 0"
    ok, ways = d.overlap or d.mixing == default_of(path), [flag("diloco.overlap", 1)]
    require(bool(ok), cfg, path, rule, *ways, flag(path, default_of(path)))
