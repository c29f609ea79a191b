"""Pack pairs of responses into sequences.

A pair is two documents, the chosen response with its prompt and the rejected one. Pairs are put one
after another into a row while they fit, in the order of the dataset: a row holds complete pairs.
The rest of a row belongs to its last document, without labels.

Shape letters: N rows, T query positions.
"""

from typing import NamedTuple

import numpy as np

from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.sharding.batch import IGNORED, Batch


class PairRows(NamedTuple):
    """The rows of a split, for one length of sequences."""

    kept: np.ndarray
    """int64 [pairs]: the pairs that fit into a row, in order."""
    first: np.ndarray
    """int64 [rows + 1]: index in `kept` of each row's first pair, then their number."""
    num_dropped: int
    """Pairs that do not fit."""
    longest: int
    """Tokens of the longest pair in a row."""

    @property
    def most_pairs(self) -> int:
        """The largest number of pairs in a row."""
        return int(np.max(np.diff(self.first), initial=1))


def plan_rows(document_offsets: np.ndarray, seq_len: int) -> PairRows:
    """Assign the pairs of a split to rows of seq_len tokens.

    The last token of a document is only a label, so a document takes one place less than it has
    tokens.

    Args:     document_offsets: int64 [2 pairs + 1].
    """
    places = np.diff(np.asarray(document_offsets, np.int64)) - 1
    lengths = places[0::2] + places[1::2]
    kept = np.flatnonzero(lengths <= seq_len)
    first, used = [0], 0
    for index, length in enumerate(lengths[kept].tolist()):
        if used + length > seq_len:
            first.append(index)
            used = 0
        used += length
    first.append(len(kept))
    dropped = len(lengths) - len(kept)
    return PairRows(kept, np.array(first), dropped, int(np.max(lengths, initial=0)))


def pack_rows(
    dataset: TokenDataset,
    rows: PairRows,
    numbers: np.ndarray,
    seq_len: int,
    reference: np.ndarray | None,
) -> Batch:
    """Make a batch of some rows.

    Args:     numbers: int64 [N]. reference: float32 [num_tokens], log probability of each token.
    Returns:  a Batch of [N, T] on the host; without `reference` if that is None.
    """
    shape = len(numbers), seq_len
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    labels, positions = np.full(shape, IGNORED, np.int32), np.zeros(shape, np.int32)
    scores = np.zeros(shape, np.float32)
    for n, number in enumerate(numbers):
        for number_in_row, part, place in places_of(dataset, rows, int(number)):
            # The last document has the rest of the row.
            segments[n, place.start :] = number_in_row + 1
            positions[n, place.start :] = np.arange(seq_len - place.start)
            tokens[n, place] = dataset.tokens[part.start - 1 : part.stop - 1]
            targets = _targets(dataset, part)
            labels[n, place] = np.where(targets, dataset.tokens[part], np.int32(IGNORED))
            if reference is not None:
                scores[n, place] = np.where(targets, reference[part], 0.0)
    return Batch(tokens, labels, segments, positions, None if reference is None else scores)


def places_of(dataset: TokenDataset, rows: PairRows, number: int) -> list[tuple[int, slice, slice]]:
    """Return where the documents of a row are: (number in the row, labels in the dataset's tokens,
    places in the row)."""
    found: list[tuple[int, slice, slice]] = []
    place, offsets = 0, dataset.document_offsets
    for pair in rows.kept[rows.first[number] : rows.first[number + 1]]:
        for document in (2 * pair, 2 * pair + 1):
            start, stop = int(offsets[document]), int(offsets[document + 1])
            length = stop - start - 1
            found.append((len(found), slice(start + 1, stop), slice(place, place + length)))
            place += length
    return found


def _targets(dataset: TokenDataset, part: slice) -> np.ndarray:
    assert dataset.targets is not None  # `PairLoader` checks it
    return dataset.targets[part] != 0
