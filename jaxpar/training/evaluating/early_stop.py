"""Judges a run's evaluations: which is the best so far, and whether the run stops early."""

from collections.abc import Mapping

from jaxpar.checkpoint import Saved, best
from jaxpar.config import Config
from jaxpar.monitoring.evaluations import Score


class Judge:
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

    def judge(self, step: int, scores: Mapping[str, Score]) -> str:
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
