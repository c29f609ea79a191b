"""Steps of runs, traced and lowered once in a test process for all runs that take the same.

A test that resumes a run, or compares it with another one, would trace the same train step again:
about a CPU second of each run, and two where a constant differs. The first run of a config traces
it; what another config, another mesh or a patched function traces is never shared. Runs share a
step where they differ only in what no step reads, and in length where the rates are an input. That
two processes trace the same program is what tests/step/test_same_program.py is for, and programs
that tests start trace their own.
"""

import contextlib
import dataclasses
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax

from jaxpar.config import Config
from jaxpar.optimizer.schedules import rate_table
from jaxpar.step.fixed_input import FixedInput
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

#: Fields of other sections that no step reads.
FIELDS_NOT_READ = {
    "train": "num_tokens num_epochs early_stop_patience log_every callbacks".split(),
    "data": "path cache_dir cache_gib prefetch tokenize_workers mixture mixture_schedule".split(),
    "guard": "max_skips spike spike_metric spike_deviations spike_window spike_skip".split(),
    "metrics": "tensorboard wandb mlflow prometheus_port prometheus_address gpus".split(),
}


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
        rates = cfg.optimizer.schedule_as_input
        table = rate_table(cfg.optimizer, cfg.train.num_steps) if rates else None
        read = functools.partial(read_by_steps, any_length=rates)
        if ex is not None:
            ex = dataclasses.replace(ex, cfg=read(ex.cfg))
        optimized = jax.config.read("jax_disable_most_optimizations")
        given = read(cfg), mesh, max_segments, ex
        length = None if table is None else len(table)
        key = make, given, tuple(more.items()), length, optimized, tuple(map(id, code))
        if key not in KEPT:
            KEPT[key] = make(*given, **more), code  # the functions stay: no other has their ids
            if len(KEPT) > MOST:
                KEPT.popitem(last=False)
        KEPT.move_to_end(key)
        step = KEPT[key][0]
        return step.with_value(table) if isinstance(step, FixedInput) else step

    return made


def read_by_steps(cfg: Config, any_length: bool = False) -> Config:
    """The config with the defaults of what no step reads.

    Args:     any_length: whether the number of steps is read by none either.
    """
    default = Config()
    unread = {name: getattr(default, name) for name in NOT_READ}
    for name, fields in FIELDS_NOT_READ.items():
        more = ("num_steps",) if name == "train" and any_length else ()
        of = getattr(default, name)
        values = {field: getattr(of, field) for field in (*fields, *more)}
        unread[name] = dataclasses.replace(getattr(cfg, name), **values)
    return dataclasses.replace(cfg, **unread)


def functions() -> list[Any]:
    """Functions that a test may have replaced: of every module that a step imports."""
    found: list[Any] = []
    for name in sorted(sys.modules):
        if name.startswith(OF_STEPS) and type(sys.modules[name]) is ModuleType:  # not a lazy one
            found += filter(callable, list(vars(sys.modules[name]).values()))
    return found
