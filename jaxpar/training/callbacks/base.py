"""The base of everything in the list of a run's callbacks."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.sharding.batch import Batch
from jaxpar.training.callbacks.callback import Progress


class RunCallback:
    """Acts between the steps of a run. The loop calls the methods of all, in the list's order."""

    key = ""
    """Under which checkpoints have what `save` returns; "" saves nothing."""

    def prepare(self, at: Progress) -> None:
        """Called before the first step."""

    def before_step(self, at: Progress, batch: Batch) -> Batch:
        """Return the batch of the next step."""
        return batch

    def after_step(self, at: Progress) -> Progress:
        """Called once a step has been dispatched. May end the run."""
        return at

    def evaluate(
        self, at: Progress, losses: Mapping[str, float | None]
    ) -> tuple[Progress, Mapping[str, Any]]:
        """Called after an evaluation. Returns metrics for its record, too."""
        return at, {}

    def save(self, at: Progress) -> str:
        """Return what a checkpoint has of it, as JSON."""
        return ""

    def close(self, at: Progress, error: BaseException | None) -> None:
        """Called in reverse order after the last step or an error, if it was prepared."""


@dataclass
class Latest:
    """The latest progress of a loop."""

    at: Progress


@contextlib.contextmanager
def prepared(callbacks: Sequence[RunCallback], at: Progress) -> Iterator[Latest]:
    """Prepare callbacks in their order, and close them in reverse."""
    latest = Latest(at)
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            callback.prepare(at)
            stack.push(lambda _, error, __, one=callback: one.close(latest.at, error))
        yield latest
