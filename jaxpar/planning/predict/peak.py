"""The memory of one GPU at its peak, by part."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on one GPU at the peak.

    weights      float32 master weights, and those of a teacher in memory.
    optimizer    moments.
    activations  values saved for the backward, and one layer's recomputed values.
    logits       a chunk of logits, and the gradient of the head.
    gathered     weights in the compute dtype: gathered ones, and casts of the shards.
    gradients    gradients of parameters.
    buffers      copies of the residual stream, gathered keys and values, the batch.
    moment       when the peak occurs: "loss", "start" or "end" of the backward, "update", or in the
                 forward pass of a "teacher".
    """

    weights: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    gradients: float
    buffers: float
    moment: str = "loss"

    @property
    def state(self) -> float:
        """Bytes that persist between steps."""
        return self.weights + self.optimizer

    @property
    def temporary(self) -> float:
        """Bytes that a step needs in addition to the state."""
        return self.activations + self.logits + self.gathered + self.gradients + self.buffers

    @property
    def total(self) -> float:
        """The predicted peak."""
        return self.state + self.temporary
