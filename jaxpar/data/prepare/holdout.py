"""Which documents are held out for evaluation."""

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
    """Whether a document is kept for evaluation.

    Chosen by content, so that copies of a document never land on both sides, and adding files
    moves no document across.

    Args:     text: its first piece.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < holdout * 2**64


def assign_splits(pieces: Iterable[Piece], holdout: float) -> Iterator[SplitPiece]:
    """Send each document to its split; a document without a visible character goes nowhere."""
    split = None
    for piece in pieces:
        if split is None:
            if piece.last and not piece.text.strip():
                continue
            split = VAL if is_held_out(piece.text, holdout) else TRAIN
        yield SplitPiece(split, piece)
        if piece.last:
            split = None
