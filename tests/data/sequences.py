"""Sequences of a token stream, as `Loader` makes them of one source."""

import numpy as np

from jaxpar.data.packing import document_begins, pack
from jaxpar.sharding.batch import Batch


def cut_sequences(
    tokens: np.ndarray,
    document_offsets: np.ndarray,
    indices: np.ndarray,
    seq_len: int,
    document_mask: bool,
) -> Batch:
    """Cut sequences out of a token stream.

    Args:     tokens: integers [num_tokens].
              document_offsets: int64 [documents + 1], increasing from 0 to num_tokens.
              indices: int64 [N], which sequences, each below `num_sequences`.
    Returns:  a Batch of int32 [N, T] on the host, as `pack` makes it.
    """
    begins = document_begins(document_offsets, indices, seq_len) if document_mask else None
    starts = (np.asarray(indices) * seq_len).tolist()
    stretch = np.stack([tokens[start : start + seq_len + 1] for start in starts])
    return pack(stretch.astype(np.int32), begins)
