"""Assign documents to the training split or the held-out split."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxpar.data.formats.meta import TRAIN, VAL
from jaxpar.data.formats.readers import Piece


class SplitPiece(NamedTuple):
    """A piece of a document, and the split that the document belongs to."""

    split: str
    piece: Piece


def is_held_out(text: str, holdout: float) -> bool:
    """Return whether a document is held out for evaluation.

    The choice depends on the content, so that copies of a document are always in the same split,
    and additional files do not change the split of other documents.

    Args:     text: the first piece of the document.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < holdout * 2**64


def assign_splits(pieces: Iterable[Piece], holdout: float) -> Iterator[SplitPiece]:
    """Assign each document to a split. Documents without visible characters are dropped."""
    split = None
    for piece in pieces:
        if split is None:
            if piece.last and not piece.text.strip():
                continue
            split = VAL if is_held_out(piece.text, holdout) else TRAIN
        yield SplitPiece(split, piece)
        if piece.last:
            split = None
