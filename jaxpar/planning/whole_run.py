"""Predicts the whole run of a config whose steps change their size: each size, and the time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.config.lists.step_sizes import StepSize, config_of, step_sizes
from jaxpar.planning.options import EXPERT_IMBALANCE
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.predict.hardware import GIB
from jaxpar.planning.ranking import Layout, predict
from jaxpar.runtime.units import duration


@dataclass(frozen=True)
class RunPart:
    """Steps of one size, and the prediction for one of them."""

    size: StepSize
    steps: int
    layout: Layout

    @property
    def seconds(self) -> float:
        """Predicted seconds of all of them."""
        return self.steps * self.layout.time.total


def parts_of(
    layout: Layout, cluster: Cluster, num_steps: int, imbalance: float = EXPERT_IMBALANCE
) -> list[RunPart]:
    """Predict the steps of each size in a run of `num_steps`.

    Args:     imbalance: as in `predict`.
    """
    return [
        RunPart(size, steps, predict(config_of(layout.cfg, size), cluster, imbalance))
        for size, steps in step_sizes(layout.cfg).until(num_steps)
    ]


def in_words(parts: Sequence[RunPart]) -> str:
    """Describe a run: its steps, tokens, time, and the size that needs the most memory."""
    steps, tokens = (
        sum(part.steps for part in parts),
        sum(part.steps * part.size.tokens for part in parts),
    )
    most = max(parts, key=lambda part: part.layout.memory.total)
    return (
        f"{steps:,} steps, {tokens:,} tokens, {duration(sum(part.seconds for part in parts))}; "
        f"the most memory, {most.layout.memory.total / GIB:.1f} GiB, with {most.size.rows:,} "
        f"sequences of {most.size.length:,} tokens"
    )


def record_of(parts: Sequence[RunPart]) -> list[dict[str, Any]]:
    """Return the parts for --json."""
    return [
        {
            "after_step": part.size.step,
            "global_batch_size": part.size.rows,
            "seq_len": part.size.length,
            "num_microbatches": part.layout.cfg.parallel.num_microbatches,
            "memory_bytes": part.layout.memory.total,
            "step_seconds": part.layout.time.total,
            "steps": part.steps,
            "seconds": part.seconds,
        }
        for part in parts
    ]
