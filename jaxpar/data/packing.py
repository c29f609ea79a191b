"""Sequences of packed documents: tokens, labels, segments and positions, by arithmetic alone.

Sequence i is tokens[i*T : i*T + T + 1]: T inputs, and the same shifted by one as labels. Documents
follow each other without padding, and one that a sequence cuts continues in the next.

Shape letters: N sequences, T query positions.
"""

import numpy as np

from jaxpar.sharding.batch import IGNORED, Batch


def num_sequences(num_tokens: int, seq_len: int) -> int:
    """Whole sequences in a split; the last label needs one token more than the inputs."""
    return max(0, (num_tokens - 1) // seq_len)


def max_documents(document_offsets: np.ndarray, num_tokens: int, seq_len: int) -> int:
    """The most documents that any sequence of a split takes tokens from."""
    starts = np.arange(num_sequences(num_tokens, seq_len), dtype=np.int64) * seq_len
    first = np.searchsorted(document_offsets, starts, side="right")
    end = np.searchsorted(document_offsets, starts + seq_len, side="left")
    return int(np.max(end - first + 1, initial=1))


def stretches(tokens: np.ndarray, indices: np.ndarray, seq_len: int) -> np.ndarray:
    """The tokens of some sequences, inputs and last label: int32 [N, T + 1]."""
    starts = np.asarray(indices, np.int64) * seq_len
    return np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int32)


def pack(
    stretch: np.ndarray, begins: np.ndarray | None, ignored: np.ndarray | None = None
) -> Batch:
    """Stretches of tokens as a batch.

    With begins, segments are numbered from 1 within the sequence, positions restart with each
    document (and with the sequence), and the label across a document's end, the first token of an
    unrelated document, is IGNORED. Without, a sequence is one causal text.

    Args:     stretch: int32 [N, T + 1].
              begins: bool [N, T + 1], where, after the first token, a document begins.
              ignored: bool [N, T + 1], tokens that are no labels. None: all are.
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


def document_begins(document_offsets: np.ndarray, indices: np.ndarray, seq_len: int) -> np.ndarray:
    """Where in some sequences, after the first token, a document begins: bool [N, T + 1].

    Looks up each sequence's two ends, then writes one flag per document between them; looking up
    every token would cost a binary search each.
    """
    starts, length = np.asarray(indices, np.int64) * seq_len, seq_len + 1
    first = np.searchsorted(document_offsets, starts, side="right")
    end = np.searchsorted(document_offsets, starts + length, side="left")
    counts = end - first
    rows = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = document_offsets[np.repeat(first, counts) + within] - starts[rows]
    begins = np.zeros((len(starts), length), bool)
    begins[rows, columns] = True
    return begins
