"""Encode pieces of text in threads, in order and in bounded memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jaxpar.data.formats.readers import PIECE_CHARS
from jaxpar.data.prepare.splits import SplitPiece
from jaxpar.data.tokenizer import Tokenizer, one_thread_per_call


def encode_pieces[Result](
    pieces: Iterable[SplitPiece],
    tokenizer: Tokenizer,
    workers: int,
    finish: Callable[[str, np.ndarray], Result],
) -> Iterator[tuple[SplitPiece, Result]]:
    """Yield the pieces with their token ids in order, at most two batches per thread ahead.

    Threads are enough, since encoders release the GIL. Unlike processes, they do not import the
    caller's main module again, and do not hang when one of them dies.

    Args:     workers: number of threads. finish: called in a thread with the text of a piece and
              its ids, int32 [tokens].
    Returns:  pairs of a piece and what `finish` returns.
    """

    def encode(batch: list[SplitPiece]) -> list[tuple[SplitPiece, Result]]:
        texts = [split_piece.piece.text for split_piece in batch]
        ids = tokenizer.encode_batch(texts)
        return list(zip(batch, map(finish, texts, ids), strict=True))

    waiting: deque[Future[list[tuple[SplitPiece, Result]]]] = deque()
    with one_thread_per_call():
        pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
        try:
            for batch in _batches(pieces):
                waiting.append(pool.submit(encode, batch))
                if len(waiting) > 2 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _batches(pieces: Iterable[SplitPiece]) -> Iterator[list[SplitPiece]]:
    batch: list[SplitPiece] = []
    num_chars = 0
    for split_piece in pieces:
        batch.append(split_piece)
        num_chars += len(split_piece.piece.text)
        if num_chars >= PIECE_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
