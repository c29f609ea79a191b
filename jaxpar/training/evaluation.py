"""Evaluates a run: on its held-out split, named sets and test split; and judges the results."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxpar.checkpoint import best
from jaxpar.checkpoint.saved import Saved
from jaxpar.config import Config, ConfigError, EvaluationSet, replace
from jaxpar.config.lists.datasets import HELD_OUT, TEST, held_out_sets
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.config.schema.features import objective_in, objectives
from jaxpar.config.schema.optimizer import AVERAGED
from jaxpar.data.formats.meta import TRAIN
from jaxpar.data.loader import Loader, open_loader
from jaxpar.data.sources import check_tokenizers
from jaxpar.monitoring.evaluations import Score
from jaxpar.objectives.objective import objective_of
from jaxpar.step import compiled
from jaxpar.step.evaluating import means
from jaxpar.step.state import TrainState, averaged
from jaxpar.step.train_step import make_eval_step

#: The order of tokens along the sequence axis, by their number: as in `Loader`.
type TokenOrder = Callable[[int], np.ndarray | None]


@dataclass(frozen=True)
class HeldOut:
    """The loaders of all evaluations, by name."""

    repeated: Mapping[str, Loader] = field(default_factory=dict)
    """Every `evaluation.every` steps: HELD_OUT, then the names of `evaluation.sets`."""
    last: Mapping[str, Loader] = field(default_factory=dict)
    """After the last step: TEST, with `evaluation.test`."""

    @property
    def loaders(self) -> dict[str, Loader]:
        """All of them."""
        return {**self.repeated, **self.last}


def open_held_out(cfg: Config, mesh: Mesh, order: TokenOrder) -> HeldOut:
    """Open the data of all evaluations, and check that each has labels.

    Args:     order: as in `Loader`.
    Raises:   ConfigError for a set that is missing or has no labels, and for a test split that is
              also evaluated during the run.
    """
    e, repeated, last = cfg.evaluation, dict[str, Loader](), dict[str, Loader]()
    if e.every:
        repeated[HELD_OUT] = open_loader(cfg, mesh, e.split, order)
        repeated |= {s.name: open_set(cfg, mesh, s, order) for s in held_out_sets(cfg)}
    if e.test:
        last[TEST] = open_loader(cfg, mesh, TEST, order)
        _check_apart(last[TEST], repeated)
    found = HeldOut(repeated, last)
    for loader in found.loaders.values():
        check_labels(cfg, loader)
    return found


def open_set(cfg: Config, mesh: Mesh, named: EvaluationSet, order: TokenOrder) -> Loader:
    """Open a set of `evaluation.sets`.

    Raises:   ConfigError that names the set, if it is missing or cannot be used.
    """
    field, given = "evaluation.sets", cfg.evaluation.sets
    assert named.split is not None  # `held_out_sets` fills it in
    only_in_training = {name: None for name, cls in objectives().items() if not cls.evaluates}
    alone = without_schedules(replace(cfg, **{"data.held_out": named.path}, **only_in_training))
    if named.split == TRAIN:
        check_tokenizers(cfg, field, given, [named.path])
        only = {"data.path": named.path, "data.mixture": (), "data.mixture_schedule": ()}
        alone = replace(alone, **only)
    try:
        return open_loader(alone, mesh, named.split, order)
    except ConfigError as error:
        if error.field not in ("data.held_out", "data.path"):
            raise
        rule, fix = f"{named.name}: {error.value} {error.rule}", error.fix
        if error.rule.startswith(("has no", "has an empty")):
            fix = f"use {named.name}:{named.path}:SPLIT, with a split that it has, or leave it out"
        raise ConfigError(field, given, rule, fix) from error


def check_labels(cfg: Config, loader: Loader) -> None:
    """Check before the run starts that the evaluation batches contain labels.

    Raises:   ConfigError when none of the batches has a label.
    """
    first, most = loader.first_labeled(), cfg.evaluation.num_batches
    if first is not None and first < most:
        return
    what = ", ".join(source.dataset.name for source in loader.sources)
    rule = f"covers only batches of {what} without a labeled token"
    fix = "use --evaluation.every 0"
    if first is not None:
        fix = f"use --evaluation.num-batches {first + 1}, or --evaluation.every 0"
    raise ConfigError("evaluation.num_batches", most, rule, fix)


def _check_apart(test: Loader, others: Mapping[str, Loader]) -> None:
    """Raises:   ConfigError if another evaluation reads a file of the test split: a single file of
    `data.held_out` is any split."""
    files = {file.resolve() for source in test.sources for file in source.dataset.files}
    for name, loader in others.items():
        for file in (file for source in loader.sources for file in source.dataset.files):
            if file.resolve() in files:
                rule = f"reads {file}, on which {name} is evaluated during the run"
                fix = "use a folder with a test split, or --evaluation.test False"
                raise ConfigError("evaluation.test", True, rule, fix)


class Evaluation:
    """Computes held-out losses, over the same batches each time."""

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh,
        data: HeldOut,
        max_segments: int,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """
        Args:     alone: as in `FirstRunAlone`.
        """
        self.cfg, self.data = cfg, data
        most = cfg.evaluation.num_batches * cfg.train.global_batch_size
        self._numbers = {
            name: loader.first_sequences(most) for name, loader in data.loaders.items()
        }
        self._every = cfg.evaluation.every
        if data.loaders:
            self.step = compiled.FirstRunAlone(make_eval_step(cfg, mesh, max_segments), alone)

    def lower(self, params: Any) -> Any:
        """Lower the evaluation step for parameters like these; `.compile()` compiles it for calls.

        Args:     params: arrays, or abstract arrays with shardings.
        Returns:  a `jax.stages.Lowered`; None without evaluation.
        """
        loader = next(iter(self.data.loaders.values()), None)
        return None if loader is None else self.step.program.lower(params, loader.abstract_batch())

    def due(self, done: int, at_end: bool) -> list[str]:
        """Return the names of what is evaluated after `done` steps.

        Args:     at_end: they are the run's last.
        """
        regular = self._every > 0 and (done % self._every == 0 or at_end)
        names = list(self.data.repeated) if regular else []
        if regular and self.cfg.optimizer.ema:
            names.insert(1, AVERAGED)
        return names + (self.at_end if at_end else [])

    @property
    def at_end(self) -> list[str]:
        """The names of what is evaluated once, after the last step."""
        return list(self.data.last)

    def __call__(self, state: TrainState, names: Iterable[str]) -> dict[str, Score]:
        """Evaluate on some of the data, by name."""
        return {name: self._score(state, name) for name in names}

    def _score(self, state: TrainState, name: str) -> Score:
        params = averaged(state, self.cfg) if name == AVERAGED else state.params
        name = HELD_OUT if name == AVERAGED else name
        loader, numbers = self.data.loaders[name], self._numbers[name]
        with contextlib.closing(loader.once(numbers)) as batches:
            found = means(self.step, params, batches)
        assert found is not None  # `held_out.check_labels`
        named = {name: float(v) for name, v in objective_of(self.cfg).report(found).items()}
        of = objective_in(self.cfg)
        if self.cfg.train.loss is None and (of is None or not of.evaluates):
            return Score.of(named["loss"], loader.bytes_per_token(numbers))
        return Score(named.pop("loss"), None, named)


class EarlyStopping:
    """Compares the metric of `checkpoint.best` with its best value so far."""

    def __init__(self, cfg: Config, first_step: int | None, saved: Saved | None = None):
        """
        Args:     first_step: the step that the run resumes from; None from scratch. saved: the
                  metadata of its state, if it is not in the run's folder.
        """
        self._cfg, self.best = cfg, best.resumed(cfg, first_step, saved)
        self.improved = False

    @property
    def stops(self) -> bool:
        """Whether the run ends: no evaluation of the last `early_stop_patience` was better."""
        patience = self._cfg.train.early_stop_patience
        return patience > 0 and self.best is not None and self.best.stale >= patience

    def update(self, step: int, scores: Mapping[str, Score]) -> str:
        """Compare an evaluation. Returns a line about it, if it was no better and that counts."""
        self.improved = False
        name = self._cfg.checkpoint.best
        if self.best is None or name not in scores:
            return ""
        self.best = self.best.after(step, scores[name].loss)
        self.improved = self.best.stale == 0
        if self.improved or not self._cfg.train.early_stop_patience:
            return ""
        return self.describe()

    def describe(self) -> str:
        """Say for how long there was no better evaluation."""
        assert self.best is not None
        count = f"{self.best.stale} of {self._cfg.train.early_stop_patience} evaluations"
        return f"no better than {self.best} of step {self.best.step}: {count}"
