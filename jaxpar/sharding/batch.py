"""The batch: the input of a training step, on the host and on the mesh."""

from typing import Any

import flax.struct
import numpy as np

from jaxpar.config import Config
from jaxpar.config.schema.features import objective_in

#: The label of positions that are excluded from the loss.
IGNORED = -1

#: In `Batch.extra`: float32 [B, T], the log probability of each label under a reference model.
REFERENCE = "reference"


@flax.struct.dataclass
class Batch:
    """One global batch of packed sequences, each array int32 [B, T], sharded by `axes.BATCH_SPEC`.

    tokens       the input tokens.
    labels       the token that follows each input token in the text, or IGNORED.
    segment_ids  index of the document in the sequence, from 1; all 1 without document masking.
    positions    position in the document (for RoPE and the causal mask); without document masking,
                 in the sequence.

    Two more are only there for the routing of experts (`model/moe/recorded.py`):

    experts      unsigned [B, T, layers with experts, k]: a recorded routing to repeat.
    rows         int32 [B], inside the step: the index of each row among those of the device.

    extra        what a loss or an objective reads in addition (`Loss.reads`,
                 `Objective.batch_extra`), by name, [B, T, ...]: "source", int32, is the index of
                 each token's source in a mixture.
    """

    tokens: Any
    labels: Any
    segment_ids: Any
    positions: Any
    experts: Any = None
    rows: Any = None
    extra: dict = flax.struct.field(default_factory=dict)

    @property
    def source(self) -> Any:
        """`extra["source"]`, for a loss that reads it."""
        return self.extra["source"]


def with_abstract_extra(batch: Batch, cfg: Config) -> Batch:
    """Add what the objective reads of `extra` to a batch without values.

    Args:     batch: of `jax.ShapeDtypeStruct`s.
    """
    of, tokens, extra = objective_in(cfg), batch.tokens, dict(batch.extra)
    for name, (dims, dtype) in ({} if of is None else of.batch_extra(cfg)).items():
        extra[name] = tokens.update(shape=(*tokens.shape, *dims), dtype=np.dtype(dtype))
    return batch.replace(extra=extra)  # type: ignore[attr-defined]
