"""What acts between the steps of a run. Imports no JAX: config files import it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jaxpar.config.values import Value

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxpar.config import Config
    from jaxpar.sharding.batch import Batch
    from jaxpar.step.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a callback asks of the run."""

    stop: str = ""
    """Why the run ends after this step, as after its last one; "" to go on."""
    save: bool = False
    """Save a checkpoint after this step."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Values for the step's record in metrics.jsonl, by name: numbers or arrays, which may still be
    computed."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run between two steps."""

    config: "Config"
    """With all that follows from the devices."""
    mesh: "Mesh"
    folder: Path
    """The run's folder."""
    step: int
    """Steps done."""
    last_step: int
    """The step after which the run ends."""
    state: "TrainState"
    """The next step reuses its memory: do not keep it."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Of the step: arrays that are the same on every device. Reading a value waits for the step."""
    request: Request = Request()
    """What callbacks have asked for after this step so far."""
    preempted: bool = False
    """Whether the run saves and ends here because of a signal."""

    def every(self, steps: int) -> bool:
        """Return whether what happens every so many steps, and at the end, happens now."""
        return steps > 0 and (self.step % steps == 0 or self.step == self.last_step)

    @property
    def ends(self) -> bool:
        """Whether the run takes no further step."""
        return self.preempted or self.step >= self.last_step

    def after(self, state: Any, metrics: Mapping[str, Any]) -> "Progress":
        """Return the progress after one more step."""
        new = {"step": self.step + 1, "state": state, "metrics": metrics}
        return dataclasses.replace(self, **new, request=Request())

    def asked(self, request: Request) -> "Progress":
        """Return the progress with a request added. The first reason to stop counts."""
        before = self.request
        merged = Request(
            stop=before.stop or request.stop,
            save=before.save or request.save,
            metrics={**before.metrics, **request.metrics},
        )
        last = min(self.step, self.last_step) if request.stop else self.last_step
        return dataclasses.replace(self, request=merged, last_step=last)


class Callback(Value):
    """Base of what acts between steps. Write the methods that you need.

    Its fields are options: a callback is a frozen value of a config. What changes during a run is
    what `prepare` returns, `own`, which every other method gets. If it is a dict, each checkpoint
    has it, and a run that resumes goes on with it.

    Methods are called in every process, in the main thread, between two steps. An exception ends
    the run.
    """

    kind: ClassVar[str] = "Callback"

    key: str = ""
    """Under which checkpoints have its state; by default, the name of its class."""

    def prepare(self, run: Progress) -> Any:
        """Called before the first step, and again if the run goes back to a checkpoint.

        Returns:  `own`.
        """
        return {}

    def before_step(self, run: Progress, own: Any, batch: "Batch") -> "Batch | None":
        """Called before each step. Returns:  another batch of the same shapes; None: the same."""
        return None

    def after_step(self, run: Progress, own: Any) -> Request | None:
        """Called once a step has been dispatched, before anything else is done with its result."""
        return None

    def evaluate(
        self, run: Progress, own: Any, losses: Mapping[str, float | None]
    ) -> Request | None:
        """Called after an evaluation. Metrics of the request go into its record.

        Args:     losses: by name, as in metrics.jsonl: `held_out_loss`, `bits_per_byte`, ....
        """
        return None

    def save(self, run: Progress, own: Any) -> dict[str, Any]:
        """Called for each checkpoint. Returns what it has of this callback, in types of JSON."""
        return own if isinstance(own, dict) else {}

    def restore(self, run: Progress, own: Any, saved: dict[str, Any]) -> Any:
        """Called after `prepare` with what the checkpoint has. Returns:  `own`."""
        return {**own, **saved} if isinstance(own, dict) else own

    def close(self, run: Progress, own: Any, error: BaseException | None) -> None:
        """Called after the last step and its checkpoint, or after an error."""


class RunCallback:
    """Acts between the steps of a run. The loop calls the methods of all, in the list's order."""

    key = ""
    """Under which checkpoints have what `save` returns; "" saves nothing."""

    def prepare(self, at: Progress) -> None:
        """Called before the first step."""

    def before_step(self, at: Progress, batch: "Batch") -> "Batch":
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
