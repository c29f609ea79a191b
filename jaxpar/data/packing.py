"""Pack documents into sequences of tokens, labels, segments and positions.

Sequence i is tokens[i*T : i*T + T + 1]: T inputs, and the same shifted by one as labels. Documents
are concatenated without padding; a document can continue in the next sequence.

Shape letters: N sequences, T query positions.
"""

import numpy as np

from jaxpar.data.formats.arrays import DocumentOffsets
from jaxpar.sharding.batch import IGNORED, Batch

#: Starts of documents.
type Offsets = np.ndarray | DocumentOffsets


def num_sequences(num_tokens: int, seq_len: int) -> int:
    """Return the number of complete sequences; the last label needs one more token."""
    return max(0, (num_tokens - 1) // seq_len)


def max_documents(document_offsets: Offsets, num_tokens: int, seq_len: int) -> int:
    """Return the maximum number of documents in a sequence of a split."""
    starts = np.arange(num_sequences(num_tokens, seq_len), dtype=np.int64) * seq_len
    first = document_offsets.searchsorted(starts, side="right")
    end = document_offsets.searchsorted(starts + seq_len, side="left")
    return int(np.max(end - first + 1, initial=1))


def pack(
    stretch: np.ndarray, begins: np.ndarray | None, ignored: np.ndarray | None = None
) -> Batch:
    """Make a batch of token sequences.

    With `begins`, segments are numbered from 1 in each sequence, positions restart at each document
    (and at each sequence), and the label at the end of a document, which is the first token of an
    unrelated document, is IGNORED. Without `begins`, a sequence is one causal text.

    Args:     stretch: int32 [N, T + 1].
              begins: bool [N, T + 1], where a document starts after the first token.
              ignored: bool [N, T + 1], tokens that are not labels. None: all are labels.
    Returns:  a Batch of int32 [N, T] on the host.
    """
    inputs, labels = stretch[:, :-1], stretch[:, 1:]
    if ignored is not None:
        labels = np.where(ignored[:, 1:], np.int32(IGNORED), labels)
    place = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    if begins is None:
        return Batch(inputs, labels, np.ones_like(inputs), place)
    here = begins[:, :-1]
    return Batch(
        tokens=inputs,
        labels=np.where(begins[:, 1:], np.int32(IGNORED), labels),
        segment_ids=1 + np.cumsum(here, axis=1, dtype=np.int32),
        positions=place - np.maximum.accumulate(np.where(here, place, 0), axis=1),
    )


def document_begins(document_offsets: Offsets, indices: np.ndarray, seq_len: int) -> np.ndarray:
    """Return where documents start in some sequences, after the first token: bool [N, T + 1].

    Searches for the two ends of each sequence and sets one flag per document between them, which
    avoids a binary search per token.
    """
    starts, length = np.asarray(indices, np.int64) * seq_len, seq_len + 1
    first = document_offsets.searchsorted(starts, side="right")
    end = document_offsets.searchsorted(starts + length, side="left")
    counts = end - first
    rows = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = document_offsets[np.repeat(first, counts) + within] - starts[rows]
    begins = np.zeros((len(starts), length), bool)
    begins[rows, columns] = True
    return begins
