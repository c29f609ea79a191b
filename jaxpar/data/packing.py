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
    # Segments in a row, of all sequences: they are few, and sums over tokens take ten times longer.
    here = begins[:, :-1].copy()
    here[:, 0] = True
    firsts = np.flatnonzero(here)
    lengths, columns = np.diff(firsts, append=here.size), firsts % here.shape[1]
    number = np.arange(1, 1 + len(firsts))
    number -= np.maximum.accumulate(np.where(columns == 0, number - 1, 0))
    each = lambda of: np.repeat(of.astype(np.int32), lengths).reshape(here.shape)  # noqa: E731
    return Batch(
        tokens=inputs,
        labels=np.where(begins[:, 1:], np.int32(IGNORED), labels),
        segment_ids=each(number),
        positions=place - each(columns),
    )


class Disordered(Exception):
    """Offsets of documents are not in the order of their tokens. Has the number of a document."""


def document_begins(document_offsets: Offsets, indices: np.ndarray, seq_len: int) -> np.ndarray:
    """Return where documents start in some sequences, after the first token: bool [N, T + 1].

    Searches for the two ends of each sequence and sets one flag per document between them, which
    avoids a binary search per token.

    Raises:   Disordered.
    """
    starts, length = np.asarray(indices, np.int64) * seq_len, seq_len + 1
    first = document_offsets.searchsorted(starts, side="right")
    end = document_offsets.searchsorted(starts + length, side="left")
    # Two more on each side: if the offsets there are not in order, searches end anywhere.
    low, high = np.maximum(first - 2, 0), np.minimum(end + 2, len(document_offsets))
    counts = np.maximum(high - low, 0)
    rows = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    documents = np.repeat(low, counts) + within
    columns = document_offsets[documents] - starts[rows]
    inside = (columns > 0) & (columns < length)
    wrong = inside != ((documents >= first[rows]) & (documents < end[rows]))
    wrong[1:] |= (columns[1:] < columns[:-1]) & (rows[1:] == rows[:-1])
    if wrong.any() or (end < first).any():
        raise Disordered(int(documents[np.argmax(wrong)]))
    begins = np.zeros((len(starts), length), bool)
    begins[rows[inside], columns[inside]] = True
    return begins
