"""What a run needs for its objective, in addition to its state."""

from typing import TYPE_CHECKING

from jaxpar.sharding.batch import Batch
from jaxpar.step.state import TrainState

if TYPE_CHECKING:
    from jaxpar.training.run import Run


class Supplement:
    """What `Objective.prepare` returns: weights of another model, or files."""

    name: str
    """As the start of a run is timed by."""

    def load(self, run: "Run", initial: TrainState | None) -> None:
        """Read or compute it, once, before the first step.

        Args:     initial: the state of a run from scratch; None for one that resumes.
        """

    def attach(self, batch: Batch) -> Batch:
        """Add what the step reads of a batch."""
        return batch
