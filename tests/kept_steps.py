"""Steps of runs, traced and lowered once in a test process for all runs that take the same.

A test that resumes a run, or compares it with another one, would trace the same train step again:
about a CPU second of each run. The first run of a config traces it; what another config, another
mesh or a patched function traces is never shared. That two processes trace the same program is what
tests/step/test_same_program.py is for, and programs that tests start trace their own.
"""

import contextlib
import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax

from jaxpar.config import Config, registry
from jaxpar.training import evaluation, programs

#: Jitted steps in memory.
MOST = 32

#: By what they are made from: the step, and the functions that it was made of.
KEPT: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()

#: The rooms whose code is in a step, or decides what is.
ROOMS = "step model parallel optimizer objectives execution kernels sharding".split()
OF_STEPS = tuple(f"jaxpar.{room}." for room in ROOMS)

#: Sections of a config that no step reads: tests/step/test_kept_steps.py.
NOT_READ = ("run", "checkpoint", "evaluation", "profile", "cluster")


@contextlib.contextmanager
def steps_kept() -> Iterator[None]:
    """Have runs take steps that an earlier run of this process has traced."""
    made = programs.make_train_step, evaluation.make_eval_step
    programs.make_train_step, evaluation.make_eval_step = map(kept, made)
    try:
        yield
    finally:
        programs.make_train_step, evaluation.make_eval_step = made


def kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make each step once."""

    def made(cfg: Config, mesh: Any, max_segments: Any, ex: Any = None, **more: Any) -> Any:
        code = functions()
        if ex is not None:
            ex = dataclasses.replace(ex, cfg=read_by_steps(ex.cfg))
        optimized = jax.config.read("jax_disable_most_optimizations")
        given = read_by_steps(cfg), mesh, max_segments, ex
        key = make, given, tuple(more.items()), optimized, tuple(map(id, code))
        if key not in KEPT:
            KEPT[key] = make(*given, **more), code  # the functions stay: no other has their ids
            if len(KEPT) > MOST:
                KEPT.popitem(last=False)
        KEPT.move_to_end(key)
        return KEPT[key][0]

    return made


def read_by_steps(cfg: Config) -> Config:
    """The config with the defaults of what no step reads."""
    unread = {name: getattr(Config(), name) for name in NOT_READ}
    metrics = dataclasses.replace(
        Config().metrics, layers=cfg.metrics.layers, layers_every=cfg.metrics.layers_every
    )
    return dataclasses.replace(cfg, metrics=metrics, **unread)


def functions() -> list[Any]:
    """Functions that a test may have replaced: of every module of a step's rooms, and those that a
    config file adds."""
    found = [function for named in registry._ADDED.values() for function in named.values()]
    for name in sorted(sys.modules):
        if name.startswith(OF_STEPS) and type(sys.modules[name]) is ModuleType:  # not a lazy one
            found += filter(callable, list(vars(sys.modules[name]).values()))
    return found
