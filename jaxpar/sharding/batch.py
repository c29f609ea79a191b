"""The batch: what a training step eats, on the host and on the mesh alike."""

from typing import Any

import flax.struct

#: A label that no loss is taken of.
IGNORED = -1


@flax.struct.dataclass
class Batch:
    """One global batch of packed sequences, each array int32 [B, T], sharded by `axes.BATCH_SPEC`.

    tokens       the input tokens.
    labels       the token that follows each input token in the text, or IGNORED.
    segment_ids  number of the document within the sequence, from 1; all 1 without document masking.
    positions    position within the document (RoPE, causality); without masking, in the sequence.
    """

    tokens: Any
    labels: Any
    segment_ids: Any
    positions: Any
