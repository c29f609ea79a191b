"""Assign documents to the training, held-out and test split."""

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpar.config import ConfigError
from jaxpar.data.formats.compressed import RowCounts
from jaxpar.data.formats.meta import TEST, TRAIN, VAL
from jaxpar.data.formats.readers import Piece
from jaxpar.data.options import HOLDOUT

#: Documents to look at for one in each split. A share of 0.001 of this many has one.
LOOKED_AT = 10_000

_IN_WORDS = {TRAIN: "training", VAL: "held-out", TEST: "test"}


class SplitPiece(NamedTuple):
    """A piece of a document, and the split that the document belongs to."""

    split: str
    piece: Piece


class Shares(NamedTuple):
    """Shares of the documents in the held-out and the test split. The others are for training."""

    val: float
    test: float = 0.0

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that a folder has."""
        return (TRAIN, VAL, TEST) if self.test else (TRAIN, VAL)

    @property
    def asked(self) -> tuple[str, ...]:
        """The splits that must have documents."""
        return (TRAIN, *[VAL] * bool(self.val), *[TEST] * bool(self.test))


def shares_of(holdout: float, split: Sequence[float] | None) -> Shares:
    """Return the shares that the options --holdout and --split ask for.

    Args:     split: relative sizes, or None for those of `holdout`.
    Raises:   ConfigError for an option that cannot work.
    """
    if split is None:
        if not 0 <= holdout < 1:
            rule = "must be at least 0 and below 1"
            raise ConfigError("--holdout", holdout, rule, "use a share such as 0.02")
        return Shares(holdout)
    if holdout != HOLDOUT:
        raise ConfigError("--holdout", holdout, "cannot go with --split", "remove one of them")
    total = sum(split)
    fine = len(split) == 3 and split[0] > 0 and min(split) >= 0 and math.isfinite(total)
    if not fine:
        rule = "must be three sizes: training, which is not 0, held-out and test"
        raise ConfigError("--split", split, rule, "use --split 98,1,1")
    return Shares(split[1] / total, split[2] / total)


def place_of(text: str) -> int:
    """Return the place of a document among all, in [0, 2**64): a hash of its first piece.

    The choice of the split depends on the content, so that copies of a document are always in the
    same split, and additional files do not change the split of other documents. For the same
    held-out share, the held-out documents are the same with and without a test split.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class Borders(NamedTuple):
    """Where the splits begin and end: documents by their places, or a single one by characters."""

    val: int
    """Documents with a place below it are held out."""
    test: int
    """Other documents with a place below it are in the test split."""
    cuts: tuple[int, ...] = ()
    """Of a single document, the characters before each split of `names` but the first."""
    names: tuple[str, ...] = ()
    """The splits of a single document, in order."""
    num_chars: int = 0
    """Characters of a single document."""

    def split(self, place: int) -> str:
        """Return the split of a document."""
        if place < self.val:
            return VAL
        return TEST if place < self.test else TRAIN


def borders_of(shares: Shares) -> Borders:
    """Return the borders of many documents."""
    return Borders(math.ceil(shares.val * 2**64), math.ceil((shares.val + shares.test) * 2**64))


def find_borders(places: Iterable[int], shares: Shares) -> Borders:
    """Return borders that leave no split empty, if there are enough documents.

    Reads places until each split has a document, at most LOOKED_AT. If all documents were read
    before, the borders move to the next ones.
    """
    borders, found, missing = borders_of(shares), list[int](), set(shares.asked)
    for place in itertools.islice(places, LOOKED_AT):
        found.append(place)
        missing.discard(borders.split(place))
        if not missing:
            return borders
    if len(found) == LOOKED_AT or len(set(found)) < len(shares.asked):
        return borders
    ordered, val, test = sorted(set(found)), bool(shares.val), bool(shares.test)
    num_test = max(bisect.bisect_left(ordered, borders.test), val + test)
    num_test = min(num_test, len(ordered) - 1)
    num_val = min(max(bisect.bisect_left(ordered, borders.val), val), num_test - test)
    return Borders(_above(ordered, num_val, borders.val), _above(ordered, num_test, borders.test))


def _above(ordered: Sequence[int], count: int, border: int) -> int:
    """Return a border above the first `count` places: the given one, if it is there."""
    if count == bisect.bisect_left(ordered, border):
        return border
    return ordered[count - 1] + 1 if count else 0


def in_words(borders: Borders, shares: Shares) -> str:
    """Return what `find_borders` or `text_borders` changed, as a line; "" for nothing."""
    if borders.cuts:
        share = {VAL: shares.val, TEST: shares.test}
        parts = [f"{100 * share[name]:.3g}% as its {_IN_WORDS[name]}" for name in borders.names[1:]]
        return f"the input is one document; its end is cut off: {' split, '.join(parts)} split"
    if borders != borders_of(shares):
        return "few documents: each split has at least one"
    return ""


def text_borders(pieces: Iterable[Piece], shares: Shares) -> Borders:
    """Return the borders of documents of text: if there is only one, it is cut at characters."""
    if len(shares.asked) == 1:
        return borders_of(shares)
    counted = _Counted()
    borders = find_borders(counted.places(pieces), shares)
    if counted.num_documents != 1:
        return borders
    names = tuple(name for name in (TRAIN, VAL, TEST) if name in shares.asked)
    held_out = [math.ceil(counted.num_chars * share) for share in (shares.val, shares.test)]
    ends = [counted.num_chars - sum(held_out), counted.num_chars - held_out[1]]
    cuts = [end for end, name in zip(ends, (VAL, TEST), strict=True) if name in names]
    return borders._replace(cuts=tuple(cuts), names=names, num_chars=counted.num_chars)


class _Counted:
    """Counts documents, and the characters of the last one."""

    def __init__(self) -> None:
        self.num_documents = self.num_chars = 0

    def places(self, pieces: Iterable[Piece]) -> Iterator[int]:
        """Yield the place of each document that is not blank."""
        place = None
        for piece in pieces:
            if place is None:
                if piece.last and not piece.text.strip():
                    continue
                place, self.num_chars = place_of(piece.text), 0
            self.num_chars += len(piece.text)
            if piece.last:
                self.num_documents += 1
                yield place
                place = None


def assign_splits(
    pieces: Iterable[Piece], borders: Borders, rows: RowCounts | None = None
) -> Iterator[SplitPiece]:
    """Assign each document to a split. Documents without visible characters are dropped.

    Args:     rows: counts those that are dropped.
    """
    split, passed = None, 0
    for piece in pieces:
        if split is None:
            if piece.last and not piece.text.strip():
                if rows:
                    rows.num_blank += 1
                continue
            split = borders.split(place_of(piece.text))
        if borders.cuts:
            yield from _cut(piece, passed, borders)
            passed += len(piece.text)
        else:
            yield SplitPiece(split, piece)
        if piece.last:
            split = None


def _cut(piece: Piece, passed: int, borders: Borders) -> Iterator[SplitPiece]:
    """Yield the parts of a piece of a single document that are in each split.

    Args:     passed: characters of the document before the piece.
    """
    edges = (0, *borders.cuts, borders.num_chars)
    for name, (start, end) in zip(borders.names, itertools.pairwise(edges), strict=True):
        first, stop = max(start - passed, 0), min(end - passed, len(piece.text))
        if first < stop:
            part = piece._replace(text=piece.text[first:stop], first=piece.first + first)
            yield SplitPiece(name, part._replace(last=passed + stop == end))


def check_no_split_is_empty(
    documents: Mapping[str, int],
    shares: Shares,
    holdout: float,
    split: Sequence[float] | None,
    fix: str,
) -> None:
    """Raise ConfigError if a split has a share and no document.

    Args:     documents: how many each split has. holdout, split: the options, of which the error
              names one. fix: how to get documents into every split.
    """
    found = sum(documents.values())
    asked = {TRAIN: 1.0, VAL: shares.val, TEST: shares.test}
    for name, there in documents.items():
        if asked[name] and not there:
            rule = f"leaves no {_IN_WORDS[name]} document of {found:,}"
            if split:
                raise ConfigError("--split", split, rule, f"{fix}, or use --split 1,0,0")
            unevaluated = "use --holdout 0, and train with --evaluation.every 0"
            raise ConfigError("--holdout", holdout, rule, f"{fix}, or {unevaluated}")
