"""Held-out losses during training."""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.config.lists.held_out_sets import EMA, HELD_OUT
from jaxpar.monitoring.evaluations import Score
from jaxpar.objectives.objective import objective_of
from jaxpar.optimizer import moving_average
from jaxpar.step import compiled
from jaxpar.step.evaluating import means
from jaxpar.step.state import TrainState, averaged
from jaxpar.step.train_step import make_eval_step
from jaxpar.training.evaluating.held_out import HeldOut


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
        if regular and moving_average.is_on(self.cfg):
            names.insert(1, EMA)
        return names + (self.at_end if at_end else [])

    @property
    def at_end(self) -> list[str]:
        """The names of what is evaluated once, after the last step."""
        return list(self.data.last)

    def __call__(self, state: TrainState, names: Iterable[str]) -> dict[str, Score]:
        """Evaluate on some of the data, by name."""
        return {name: self._score(state, name) for name in names}

    def _score(self, state: TrainState, name: str) -> Score:
        ema = name == EMA
        params = averaged(state, self.cfg) if ema else state.params
        name = HELD_OUT if ema else name
        loader, numbers = self.data.loaders[name], self._numbers[name]
        with contextlib.closing(loader.once(numbers)) as batches:
            found = means(self.step, params, batches)
        assert found is not None  # `held_out.check_labels`
        named = {name: float(v) for name, v in objective_of(self.cfg).report(found).items()}
        if len(named) == 1 and self.cfg.train.loss is None:
            return Score.of(named["loss"], loader.bytes_per_token(numbers))
        return Score(named.pop("loss"), None, named)
