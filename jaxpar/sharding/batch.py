"""The batch: the input of a training step, on the host and on the mesh."""

from typing import Any

import flax.struct

#: The label of positions that are excluded from the loss.
IGNORED = -1


@flax.struct.dataclass
class Batch:
    """One global batch of packed sequences, each array int32 [B, T], sharded by `axes.BATCH_SPEC`.

    tokens       the input tokens.
    labels       the token that follows each input token in the text, or IGNORED.
    segment_ids  index of the document in the sequence, from 1; all 1 without document masking.
    positions    position in the document (for RoPE and the causal mask); without document masking,
                 in the sequence.

    One more is only there for pairs of responses (`objectives/pairs.py`):

    reference    float32 [B, T]: log probability of each label under the reference model.

    Two more are only there for distillation (`objectives/distillation.py`):

    teacher_ids     int32 [B, T, k]: the teacher's likeliest next tokens.
    teacher_scores  float32 [B, T, k]: their log probabilities.

    Two more are only there for the routing of experts (`model/moe/recorded.py`):

    experts      unsigned [B, T, layers with experts, k]: a recorded routing to repeat.
    rows         int32 [B], inside the step: the index of each row among those of the device.

    extra        what a loss reads in addition (`Loss.reads`), by name, int32 [B, T]: "source" is
                 the index of each token's source in a mixture.
    """

    tokens: Any
    labels: Any
    segment_ids: Any
    positions: Any
    reference: Any = None
    teacher_ids: Any = None
    teacher_scores: Any = None
    experts: Any = None
    rows: Any = None
    extra: dict = flax.struct.field(default_factory=dict)

    @property
    def source(self) -> Any:
        """`extra["source"]`, for a loss that reads it."""
        return self.extra["source"]
