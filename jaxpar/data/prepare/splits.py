"""Assign documents to the training, held-out and test split."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxpar.config import ConfigError
from jaxpar.data.formats.meta import TEST, TRAIN, VAL, SplitMeta
from jaxpar.data.formats.readers import Piece

#: Held-out share of the documents unless an option says otherwise.
HOLDOUT = 0.02

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


def shares_of(holdout: float, split: str) -> Shares:
    """Return the shares that the options --holdout and --split ask for.

    Args:     split: relative sizes, as "98,1,1", or "" for those of `holdout`.
    Raises:   ConfigError for an option that cannot work.
    """
    if not split:
        if not 0 <= holdout < 1:
            rule = "must be at least 0 and below 1"
            raise ConfigError("--holdout", holdout, rule, "use a share such as 0.02")
        return Shares(holdout)
    if holdout != HOLDOUT:
        raise ConfigError("--holdout", holdout, "cannot go with --split", "remove one of them")
    try:
        sizes = [float(size) for size in split.split(",")]
    except ValueError:
        sizes = []
    total = sum(sizes)
    fine = len(sizes) == 3 and sizes[0] > 0 and min(sizes) >= 0 and math.isfinite(total)
    if not fine:
        rule = "must be three sizes: training, which is not 0, held-out and test"
        raise ConfigError("--split", split, rule, "use --split 98,1,1")
    return Shares(sizes[1] / total, sizes[2] / total)


def split_of(text: str, shares: Shares) -> str:
    """Return the split of a document.

    The choice depends on the content, so that copies of a document are always in the same split,
    and additional files do not change the split of other documents. For the same held-out share,
    the held-out documents are the same with and without a test split.

    Args:     text: the first piece of the document.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    place = int.from_bytes(digest, "big")
    if place < shares.val * 2**64:
        return VAL
    return TEST if place < (shares.val + shares.test) * 2**64 else TRAIN


def assign_splits(pieces: Iterable[Piece], shares: Shares) -> Iterator[SplitPiece]:
    """Assign each document to a split. Documents without visible characters are dropped."""
    split = None
    for piece in pieces:
        if split is None:
            if piece.last and not piece.text.strip():
                continue
            split = split_of(piece.text, shares)
        yield SplitPiece(split, piece)
        if piece.last:
            split = None


def check_no_split_is_empty(
    splits: Mapping[str, SplitMeta], shares: Shares, holdout: float, split: str, fix: str
) -> None:
    """Raise ConfigError if a split has a share and no document.

    Args:     holdout, split: the options, of which the error names one. fix: how to get documents
              into every split.
    """
    found = sum(sizes.num_documents for sizes in splits.values())
    asked = {TRAIN: 1.0, VAL: shares.val, TEST: shares.test}
    for name, sizes in splits.items():
        if asked[name] and not sizes.num_documents:
            rule = f"leaves no {_IN_WORDS[name]} document of {found:,}"
            if split:
                raise ConfigError("--split", split, rule, f"{fix}, or use --split 1,0,0")
            raise ConfigError("--holdout", holdout, rule, f"{fix}, or use --holdout 0")
