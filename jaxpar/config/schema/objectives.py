"""The sections of objectives in place of next-token cross entropy."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.ranges import Example, Positive, Reals


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Preference tuning on pairs of responses (DPO)."""

    beta: Positive = 0.1
    """Factor of the implicit reward, log(policy / reference). A larger one keeps the policy closer
    to the reference."""
    label_smoothing: Annotated[float, Reals(0, 0.5, below=True)] = 0.0
    """Share of the pairs whose preference is assumed to be wrong (cDPO)."""
    too_long: Literal["error", "drop"] = "error"
    """Pairs that are longer than data.seq_len: refuse the data, or leave them out."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Distillation from a teacher model."""

    teacher: Annotated[str, Example("runs/teacher")]
    """Run whose model is the teacher, with the same tokenizer."""
    cache: str = ""
    """Folder of what the teacher says of the training data, which `python -m jaxpar.data teacher`
    writes: training then needs no teacher in memory. Empty: the teacher runs before each step."""
    weight: Annotated[float, Reals(0, 1, above=True)] = 0.5
    """Share of the divergence from the teacher in the loss. The rest is the cross entropy."""
    temperature: Positive = 1.0
    """Temperature of both distributions. Above 1, unlikely tokens count for more."""
    top_k: int = 64
    """Tokens of the teacher that are compared one by one, at each position. The others count as
    one. model.vocab_size compares all, which takes as much memory as the logits."""
