"""Rules about a run: its paths, schedule, checkpoints, evaluation, profile and own values."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from jaxpar.config import Config, ConfigError, default_of, flag, require, value_of
from jaxpar.config.fields import refused, turning_off
from jaxpar.config.lists.datasets import HELD_OUT, TEST
from jaxpar.config.lists.step_sizes import check_shares
from jaxpar.config.rules.paths import (
    FIELD,
    check_path,
    check_path_or_address,
    check_run_folder,
    read_address,
)
from jaxpar.config.schema.features import SECTIONS, paths_of_features
from jaxpar.config.schema.optimizer import AVERAGED
from jaxpar.config.values import FIELDS, Value

#: Names of sets become parts of the names of metrics.
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def places(cfg: Config) -> None:
    """Check the paths of the run and its data."""
    for path in ("run.dir", "data.path"):
        if path == "data.path" and cfg.data.mixture:  # which is in place of it
            continue
        ok = bool(value_of(cfg, path).strip())
        require(ok, cfg, path, "must name a folder", flag(path, default_of(path)))
    _paths("data.mixture", cfg.data.mixture)
    for path in ("data.path", "data.held_out", "run.init_from", *paths_of_features("addresses")):
        name = value_of(cfg, path)  # None in a section that is off
        if name is not None and (path != "data.path" or not cfg.data.mixture):
            check_path_or_address(path, name, f"use {flag(path, default_of(path))}")
    for path in ("run.dir", "run.compilation_cache", "data.cache_dir"):
        check_path(path, value_of(cfg, path), "use " + flag(path, default_of(path)))
    if cfg.run.store:
        read_address(FIELD, cfg.run.store)
    check_run_folder("run.dir", cfg.run.dir, "use " + flag("run.dir", default_of("run.dir")))


def _paths(path: str, items: tuple[Any, ...]) -> None:
    """Check the paths of the items of a list. The fix leaves out all that cannot be used."""
    wrong: dict[int, ConfigError] = {}
    for i, one in enumerate(items):
        try:
            check_path_or_address(f"{path}[{i}].path", one.path, "")
        except ConfigError as error:
            wrong[i] = error
    left = tuple(one for i, one in enumerate(items) if i not in wrong)
    for one in wrong.values():
        raise refused(one.field, one.value, one.rule, flag(path, left))


def initial_weights(cfg: Config) -> None:
    """Check the fields that may differ from those of the initial weights."""
    path, rule = "run.init_changes", "needs run.init_from, which is empty"
    ok = not cfg.run.init_changes or bool(cfg.run.init_from)
    require(ok, cfg, path, rule, flag(path, ()))


def schedule(cfg: Config) -> None:
    """Check what the schedule counts, and that it has a decay whose steps can be set."""
    check_shares(cfg)
    o, path = cfg.optimizer, "optimizer.decay_steps"
    rule = "has no effect: the learning rate is constant after the warm-up"
    ok = o.decay_steps == 0 or o.schedule != "constant"
    require(ok, cfg, path, rule, flag(path, 0), flag("optimizer.schedule", "wsd"))
    rule = f"must be at most train.num_steps = {cfg.train.num_steps} for wsd, which decays last"
    ok = o.decay_steps <= cfg.train.num_steps or o.schedule != "wsd"
    require(ok, cfg, path, rule, flag(path, max(cfg.train.num_steps // 5, 1)), flag(path, 0))


def saving(cfg: Config) -> None:
    """Check that the requested checkpoints will be saved."""
    path, every, keep_every = (
        "checkpoint.keep_every",
        cfg.checkpoint.every,
        cfg.checkpoint.keep_every,
    )
    never, needs = flag(path, 0), "needs checkpoints, but checkpoint.every is 0"
    some = flag("checkpoint.every", keep_every or 500)
    require(keep_every == 0 or every > 0, cfg, path, needs, some, never)
    if every > 0:
        rule = f"must be a multiple of checkpoint.every = {every}"
        more = flag(path, -(-keep_every // every) * every)
        require(keep_every % every == 0, cfg, path, rule, more, never)
    path = "checkpoint.resume"
    ok = cfg.checkpoint.resume != "must" or every > 0
    require(ok, cfg, path, needs, some, flag(path, "auto"))
    path, memory = "checkpoint.memory.every", cfg.checkpoint.memory
    rule = f"must be at most checkpoint.every = {every}, whose checkpoints would always be newer"
    ok = memory is None or every == 0 or memory.every <= every
    require(ok, cfg, path, rule, flag(path, max(every // 10, 1)), *turning_off(path))


def evaluation(cfg: Config) -> None:
    """Check that evaluation sets have names and paths, and that something evaluates them."""
    e, path = cfg.evaluation, "evaluation.sets"
    _paths(path, e.sets)
    taken, wrong = (HELD_OUT, TEST, AVERAGED), dict[int, str]()
    for i, one in enumerate(e.sets):
        if one.name in taken:
            wrong[i] = "has another meaning"
        elif not _SET_NAME.fullmatch(one.name):
            wrong[i] = "must have at most 64 letters, digits, '_', '-' and '.'"
    named = lambda i: dataclasses.replace(e.sets[i], name=f"set{i}") if i in wrong else e.sets[i]  # noqa: E731
    for i, rule in wrong.items():
        way = flag(path, tuple(map(named, range(len(e.sets)))))
        raise refused(f"{path}[{i}].name", e.sets[i].name, rule, way)
    rule = "are never evaluated: evaluation.every is 0"
    require(not e.sets or e.every > 0, cfg, path, rule, flag("evaluation.every", 500))


def best(cfg: Config) -> None:
    """Check that the best checkpoint has a metric that is evaluated, and can be saved."""
    path, name, e = "checkpoint.best", cfg.checkpoint.best, cfg.evaluation
    names = [HELD_OUT, *([AVERAGED] if cfg.optimizer.ema else [])]
    names += [one.name for one in e.sets]
    rule = f"must be what is evaluated, {', '.join(names)}, or empty"
    require(not name or name in names, cfg, path, rule, flag(path, HELD_OUT))
    rule = "is never evaluated: evaluation.every is 0"
    require(not name or e.every > 0, cfg, path, rule, flag("evaluation.every", 500))
    rule = "needs checkpoints, but checkpoint.every is 0"
    require(not name or cfg.checkpoint.every > 0, cfg, path, rule, flag("checkpoint.every", 500))
    path = "train.early_stop_patience"
    rule = "needs the metric that has to improve, but checkpoint.best is empty"
    ok = not cfg.train.early_stop_patience or bool(name)
    require(ok, cfg, path, rule, flag("checkpoint.best", HELD_OUT), flag(path, 0))


#: Steps of one trace. A large step has tens of thousands of events, kept in memory until it ends.
MAX_PROFILED_STEPS = 20

#: Profiles of one attempt, so that repeats and requests do not fill the disk.
MAX_PROFILES = 20


def profile(cfg: Config) -> None:
    """Check that the profiled steps are part of the run, and that one attempt may take them."""
    path, start, last = "profile.start", cfg.profile.start, cfg.train.num_steps
    rule = f"must be a step of the run: train.num_steps is {last}"
    require(start <= last, cfg, path, rule, flag(path, last), flag("train.num_steps", start))
    path, most = "profile.num_steps", MAX_PROFILED_STEPS * MAX_PROFILES
    rule = f"must be at most {most}: {MAX_PROFILES} profiles of {MAX_PROFILED_STEPS} steps"
    require(cfg.profile.num_steps <= most, cfg, path, rule, flag(path, most))
    path, every, steps = "profile.every", cfg.profile.every, cfg.profile.num_steps
    rule = "repeats the profile of profile.start, which is 0"
    require(not every or start > 0, cfg, path, rule, flag("profile.start", 100), flag(path, 0))
    rule = f"must be more than profile.num_steps = {steps}, so that profiles do not overlap"
    require(not every or every > steps, cfg, path, rule, flag(path, 10 * steps), flag(path, 0))


def own_values(cfg: Config) -> None:
    """Let each value, and each section of a feature, check the config that holds it."""
    for path, value in values_of(cfg):
        value.check(cfg, path)
    for name in SECTIONS:
        if (section := value_of(cfg, name)) is not None:
            section.check(cfg, name)


def values_of(cfg: Config) -> Iterator[tuple[str, Value]]:
    """Yield every value of a config, with the path of its field."""
    for path, (_, several) in FIELDS.items():
        held = value_of(cfg, path)
        for value in held if several else (held,):
            if isinstance(value, Value):
                yield path, value
