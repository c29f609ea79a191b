"""The phases of a training loop: what it does now."""

from dataclasses import dataclass

from jaxpar.monitoring.goodput import Recorder
from jaxpar.runtime.stages import Stage
from jaxpar.runtime.watchdog import Watchdog

#: What the loop does in a phase, with the number of the step.
IN_WORDS = {
    "step": "step {}",
    "data wait": "waiting for the batch of step {}",
    "compile": "compiling for the size of step {}",
    "evaluation": "evaluating after step {}",
    "save wait": "waiting for the save of step {}",
    "restore": "going back from step {}",
    "profile": "writing a profile before step {}",
}


@dataclass(frozen=True)
class Phases:
    """The current phase of the loop, for the watchdog (its limit), goodput (its duration) and the
    lines that say what takes long."""

    watch: Watchdog
    spent: Recorder
    stage: Stage

    def enter(self, part: str, step: int, *, slow: bool = False) -> None:
        """Enter a phase of a step.

        Args:     part: of `goodput.PARTS`. slow: as in `Watchdog.enter`.
        """
        self.spent.now(part)
        self.watch.enter(part, step, slow=slow)
        words = IN_WORDS.get(part, part + " at step {}")
        self.stage.enter(words.format(step), ordinary=part in ("step", "data wait"))
