"""Functions of the user that the training loop calls: after steps, evaluations and saves."""

import dataclasses
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar import checkpoint
from jaxpar.config import ConfigError


class StopTraining(Exception):
    """Raised by a callback to end the run: it saves a checkpoint and stops, as after SIGTERM."""


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Callbacks:
    """Functions that the training loop calls, in every process and from its main thread.

    An exception in one ends the run as an error, except StopTraining.
    """

    on_start: Callable[[int], Any] = _nothing
    """(step): before the first step, with the number of steps done."""
    on_step: Callable[[int, Mapping[str, Any]], Any] = _nothing
    """(step, metrics): after every `train.log_every` steps, with the record of metrics.jsonl. The
    values of a step arrive while the next one runs."""
    on_evaluation: Callable[[int, Mapping[str, Any], Any], Any] = _nothing
    """(step, metrics, state): after an evaluation. The next step reuses the state's memory."""
    on_save: Callable[[int, Path], Any] = _nothing
    """(step, folder): once a checkpoint is complete, soon after it is."""
    on_end: Callable[[int], Any] = _nothing
    """(code): after the last step and its checkpoint, with the exit code; not after an error."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not callable(value := getattr(self, field.name)):
                fix = f"pass a function: {field.name}=print"
                raise ConfigError(field.name, value, "is not a function", fix)


class CallbackCalls:
    """Calls the callbacks of a run. The training loop calls a method at each of its points."""

    def __init__(self, callbacks: Callbacks, run_dir: Path, evaluates: bool):
        """Args:     evaluates: whether the run has held-out data."""
        self._to, self._dir, self._evaluates = callbacks, run_dir, evaluates
        #: Asks the run to save and stop, with the reason.
        self.request_stop: Callable[[str], None] = lambda reason: None
        self._evaluation: dict[str, Any] = {}
        self._saved: queue.SimpleQueue[int] = queue.SimpleQueue()

    def started(self, step: int) -> None:
        """Call `on_start`."""
        self._call(self._to.on_start, step)

    def record(self, record: Mapping[str, Any]) -> None:
        """Take a record of metrics.jsonl: call `on_step`, or keep it for `evaluated`."""
        if "loss" in record:
            self._call(self._to.on_step, record["step"], dict(record))
        elif "step" in record and self._evaluates:
            self._evaluation |= record

    def evaluated(self, state: Any) -> None:
        """Call `on_evaluation` with what was recorded since the last call, if anything was."""
        record, self._evaluation = self._evaluation, {}
        if record:
            self._call(self._to.on_evaluation, record["step"], record, state)

    def event(self, name: str, **more: Any) -> None:
        """Note an event, from any thread; `deliver` calls `on_save` for those of saves."""
        if name == "saved":
            self._saved.put(more["step"])

    def deliver(self) -> None:
        """Call `on_save` for the checkpoints that have been completed since the last call."""
        while not self._saved.empty():
            step = self._saved.get()
            self._call(self._to.on_save, step, checkpoint.folder(self._dir) / str(step))

    def ended(self, code: int) -> None:
        """Call `on_end`."""
        self.deliver()
        self._call(self._to.on_end, code)

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except StopTraining as stop:
            self.request_stop(str(stop) or "StopTraining")
