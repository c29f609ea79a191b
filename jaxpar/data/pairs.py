"""Pack pairs of responses into sequences.

A pair is two documents, the chosen response with its prompt and the rejected one. Pairs are put one
after another into a row while they fit, in the order of the dataset: a row holds complete pairs.
The rest of a row belongs to its last document, without labels.

Shape letters: N rows, T query positions.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from jaxpar.config import ConfigError, flag
from jaxpar.data.formats.meta import PAIRS
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader, check_vocabulary
from jaxpar.data.packing import Offsets
from jaxpar.sharding.batch import IGNORED, REFERENCE, Batch


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


def plan_rows(document_offsets: Offsets, seq_len: int) -> PairRows:
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
    Returns:  a Batch of [N, T] on the host; with `REFERENCE` unless that is None.
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
    extra = {} if reference is None else {REFERENCE: scores}
    return Batch(tokens, labels, segments, positions, extra=extra)


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


# ------------------------ Global batches of pairs of responses, as a pure function of seed and step


#: The command that makes a dataset of pairs.
PREPARE_PAIRS = "python -m jaxpar.data prepare-pairs"


class PairLoader(Loader):
    """A `Loader` whose sequences are rows of packed pairs (`pairs.py`)."""

    #: float32 [tokens]: log probability of each target of the split under the reference model, and
    #: 0 of others. None until it is known: batches are then without `REFERENCE`.
    reference: np.ndarray | None = None

    @property
    def dataset(self) -> TokenDataset:
        """The split's only source."""
        return self.sources[0].dataset

    @functools.cached_property
    def rows(self) -> PairRows:
        """The rows of the split."""
        return plan_rows(self.dataset.document_offsets, self._cfg.data.seq_len)

    @property
    def sequences_per_epoch(self) -> list[int]:
        """The number of rows."""
        return [len(self.rows.first) - 1]

    @property
    def max_documents(self) -> int:
        """An upper bound on the segments in a row, a power of two."""
        return 2 << (self.rows.most_pairs - 1).bit_length()

    def _check_fits(self, dataset: TokenDataset) -> None:
        cfg, path = self._cfg, dataset.name
        check_vocabulary(cfg, dataset)
        if dataset.meta is None or dataset.meta.kind != PAIRS or dataset.targets is None:
            rule = f"is not a dataset of pairs, which {type(self._objective).__name__} needs"
            raise ConfigError("data.path", path, rule, f"prepare one with `{PREPARE_PAIRS}`")
        rows, seq_len = self.rows, cfg.data.seq_len
        if rows.num_dropped and (self._objective.too_long == "error" or not len(rows.kept)):
            of_all = f"{rows.num_dropped:,} of {dataset.num_documents // 2:,} pairs"
            rule = f"is shorter than {of_all} of {path} ({self.split}); the longest has "
            rule += f"{rows.longest:,} tokens"
            fix = "use " + flag("data.seq_len", -(-rows.longest // 128) * 128)
            if len(rows.kept):
                fix += f", or leave them out with {self._objective.option('too_long', 'drop')}"
            raise ConfigError("data.seq_len", seq_len, rule, fix)

    def _packed_sequences(self, numbers: np.ndarray, pieces: np.ndarray, length: int) -> Batch:
        assert length == self._cfg.data.seq_len  # a rule of the config: rows are not cut
        return self._packed_rows(self._sequences[0](numbers))

    def _packed_rows(self, rows: np.ndarray) -> Batch:
        return pack_rows(self.dataset, self.rows, rows, self._cfg.data.seq_len, self.reference)

    def _without_labels(self, host: Batch, rows: np.ndarray) -> Batch:
        # A pair counts where its first document, of an odd number, begins: such a row has none.
        host = super()._without_labels(host, rows)
        segments = np.where(rows[:, None], np.int32(2), host.segment_ids)
        return dataclasses.replace(host, segment_ids=segments)

    def batch_of_rows(self, rows: np.ndarray) -> Batch:
        """Return a global batch of some rows of the split, like `batch`.

        Args:     rows: int64 [global_batch_size], the same in every process.
        """
        _, count, length = self.sizes.at(0)  # steps of pairs have one size
        host = self._packed_rows(rows[self._rows[count]])
        return self._place(0, self._ordered(host, length))
