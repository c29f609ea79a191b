"""The best evaluation of a run so far: its checkpoint is kept, and programs read it by name.

Each checkpoint records the best evaluation up to its step (`Saved.best`). A run that resumes from
it therefore judges later evaluations as an uninterrupted run would.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from jaxpar.checkpoint.saved import Saved, read_saved, read_whole, saved_steps
from jaxpar.config import Config, ConfigError
from jaxpar.config.lists.datasets import held_out_sets
from jaxpar.config.option_fields import Step


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    what: str
    """What is compared: the metric, and what it is computed on."""
    step: int = 0
    value: float | None = None
    """None before the first finite value."""
    stale: int = 0
    """Evaluations since."""

    def after(self, step: int, value: float) -> "Best":
        """Return the best evaluation after one more. Of equal values, the first is the best."""
        if value < (float("inf") if self.value is None else self.value):
            return Best(self.what, step, value)
        return dataclasses.replace(self, stale=self.stale + 1)

    def __str__(self) -> str:
        name = self.what.partition(" ")[0]
        return f"{name} {self.value:.4f}" if self.value is not None else f"no {name} yet"


def fresh(cfg: Config) -> Best | None:
    """Return the state before the first evaluation; None if `checkpoint.best` is empty."""
    name, e = cfg.checkpoint.best, cfg.evaluation
    if not name:
        return None
    paths = {one.name: f"{one.path} {one.split}" for one in held_out_sets(cfg)}
    data = paths.get(name, f"{cfg.data.held_out or 'data'} {e.split}")
    return Best(f"{name} of {data}, {e.num_batches} batches")


def resumed(cfg: Config, step: int | None, elsewhere: Saved | None = None) -> Best | None:
    """Return the state of the checkpoint from which a run resumes; fresh if another is compared.

    Args:     step: None for a run that starts from scratch. elsewhere: metadata of a state that is
              not in the run's folder; used if it is of that step.
    """
    start = fresh(cfg)
    if start is None or step is None:
        return start
    known = elsewhere is not None and elsewhere.step == step
    found = of(elsewhere if known and elsewhere else read_saved(cfg.run.dir, step))
    return found if found is not None and found.what == start.what else start


def of(saved: Saved) -> Best | None:
    """Return the best evaluation up to a checkpoint; None if it records none."""
    return Best(**saved.best) if saved.best else None


def latest(run_dir: str | Path) -> Best | None:
    """Return the best evaluation up to the latest intact checkpoint; None if there is none.

    Raises:   ConfigError when there is no checkpoint; Damaged; Unreadable.
    """
    return of(read_whole(run_dir, None, lambda at: read_saved(run_dir, at)))


def step_of(run_dir: str | Path, step: Step) -> int | None:
    """Return the step that a program reads, in place of "best".

    Raises:   ConfigError when the run has no best checkpoint, or it is no longer there.
    """
    if not isinstance(step, str):
        return step
    there = saved_steps(run_dir)
    found = latest(run_dir) if there else None
    if found is None or found.value is None:
        rule = f"{run_dir} has no best checkpoint"
        raise ConfigError("--step", step, rule, "train with --checkpoint.best held_out")
    if found.step not in there:
        rule = f"the best checkpoint of {run_dir}, step {found.step}, is not there"
        raise ConfigError("--step", step, rule, f"use one of {', '.join(map(str, there))}")
    return found.step
