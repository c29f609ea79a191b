"""Prepare a dataset of text: read documents, hold some out, encode them, write a dataset.

The result depends only on the documents and the options, not on the number of workers.
"""

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.numerals import only_digits
from jaxpar.config.options import check_ranges
from jaxpar.data.formats.compressed import RowCounts
from jaxpar.data.formats.meta import TRAIN, Meta, SplitMeta
from jaxpar.data.formats.readers import PIECE_CHARS, ReadOptions
from jaxpar.data.formats.writer import SplitWriter, whole_folder, write_meta
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.documents import InputFile, Wanted, find_sources, read_pieces
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.splits import (
    Borders,
    SplitPiece,
    assign_splits,
    check_no_split_is_empty,
    in_words,
    shares_of,
    text_borders,
)
from jaxpar.data.stream.writing import IndexWriter, begin_index, cut_text, finish_index, one_part
from jaxpar.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    one_thread_per_call,
    open_tokenizer,
    train_bpe,
)
from jaxpar.runtime.units import size

# --------------------------------- Encode pieces of text in threads, in order and in bounded memory


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


#: `--tokenizer bpe:N` trains a BPE of N tokens.
BPE = "bpe:"

#: Maximum digits of N, since `tokenizers` allocates memory for N tokens and accepts 64 bits.
BPE_DIGITS = 8

#: Characters of text to train a BPE on: about 2 s for 8192 tokens on two cores.
BPE_SAMPLE_CHARS = 10_000_000


def prepare(options: PrepareOptions, progress: PreparationProgress | None = None) -> Meta:
    """Write a dataset folder.

    Returns:  the contents of its meta.json.
    Raises:   ConfigError that names an option, or an unreadable file and line.
    """
    _check(options)
    progress = progress or PreparationProgress()
    wanted = Wanted(options.extension, (options.text_field,))
    sources = find_sources(options.input, wanted, progress.log)
    with whole_folder(options.output, options.overwrite) as folder:
        tokenizer = _make_tokenizer(options, sources, progress)
        return _write(folder, options, sources, tokenizer, progress)


def _write(
    folder: Path,
    options: PrepareOptions,
    sources: Sequence[InputFile],
    tokenizer: Tokenizer,
    progress: PreparationProgress,
) -> Meta:
    shares, read = shares_of(options.holdout, options.split), _read_options(options)
    total = sum(source.num_bytes for source in sources)
    borders = _borders(sources, options)
    if line := in_words(borders, shares):
        progress.log(line)
    progress.log(f"encoding {size(total)} of input on {options.workers} threads")
    pieces = assign_splits(read_pieces(sources, read), borders, read.rows)
    stream = options.stream
    index = begin_index(folder, sources, options.text_field) if stream else None
    make = IndexWriter if stream else SplitWriter
    cut = functools.partial(cut_text if stream else one_part, tokenizer=tokenizer)
    writers = {
        split: make(folder, split, tokenizer.vocab_size, tokenizer.eos_id)
        for split in shares.splits
    }
    for (split, piece), parts in encode_pieces(pieces, tokenizer, options.workers, cut):
        writers[split].append(piece, parts)
        num_tokens = sum(writer.num_tokens for writer in writers.values())
        progress.advance(piece.position, total, num_tokens)
    splits = {split: writer.close() for split, writer in writers.items()}
    read.rows.check(" ".join(options.input))
    _check_documents(splits, options)
    for line in read.rows.lines():
        progress.log(line)
    if index is not None:
        finish_index(index, shares.splits)
    train, inputs = writers[TRAIN], options.input
    return write_meta(folder, tokenizer, train, splits, inputs, *shares, rows=read.rows)


def _check(options: PrepareOptions) -> None:
    shares_of(options.holdout, options.split)
    check_ranges(options)
    named = options.tokenizer == ByteTokenizer.kind or options.tokenizer.startswith(BPE)
    if options.eos_token is not None and named:
        rule = f"needs a tokenizer.json, but --tokenizer is {options.tokenizer}"
        raise ConfigError("--eos-token", options.eos_token, rule, "remove it")
    if options.separator == "":
        raise ConfigError("--separator", "", "must not be empty", r"use a text such as '\n\n'")


def _read_options(options: PrepareOptions) -> ReadOptions:
    separator = options.separator
    if separator is not None:
        separator = separator.replace("\\n", "\n")
    return ReadOptions(
        options.text_field, separator, bool(options.extension), RowCounts(options.on_bad_row)
    )


def _borders(sources: Sequence[InputFile], options: PrepareOptions) -> Borders:
    shares = shares_of(options.holdout, options.split)
    return text_borders(read_pieces(sources, _read_options(options)), shares)


def _make_tokenizer(
    options: PrepareOptions, sources: Sequence[InputFile], progress: PreparationProgress
) -> Tokenizer:
    spec = options.tokenizer
    if spec.startswith(BPE) and only_digits(spec.removeprefix(BPE)):
        if len(spec.removeprefix(BPE)) > BPE_DIGITS:
            rule = f"has a vocabulary of more than {BPE_DIGITS} digits"
            raise ConfigError("--tokenizer", spec[:60], rule, f"use {BPE}8192")
        progress.log(f"training a tokenizer, {spec}")
        bpe = train_bpe(_sample(sources, options), asked := int(spec.removeprefix(BPE)))
        if bpe.vocab_size < asked:
            progress.log(f"the text has no more pairs to merge; using {bpe.vocab_size:,} tokens")
        return bpe
    return open_tokenizer(spec, options.eos_token, trains=True)


def _sample(sources: Sequence[InputFile], options: PrepareOptions) -> Iterator[str]:
    """Yield training text of all files in a fixed random order, with about equal shares."""
    order, borders = list(sources), _borders(sources, options)
    random.Random(0).shuffle(order)
    share = max(BPE_SAMPLE_CHARS // len(order), PIECE_CHARS)
    shares = (_up_to(share, _training_texts(source, options, borders)) for source in order)
    return _up_to(BPE_SAMPLE_CHARS, itertools.chain.from_iterable(shares))


def _training_texts(source: InputFile, options: PrepareOptions, borders: Borders) -> Iterator[str]:
    pieces = assign_splits(read_pieces([source], _read_options(options)), borders)
    return (piece.text for split, piece in pieces if split == TRAIN)


def _up_to(num_chars: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text[:num_chars]
        num_chars -= len(text)
        if num_chars <= 0:
            return


def _check_documents(splits: dict[str, SplitMeta], options: PrepareOptions) -> None:
    if not any(split.num_documents for split in splits.values()):
        given = " ".join(options.input)
        raise ConfigError("--input", given, "has no text", "use files with documents")
    shares = shares_of(options.holdout, options.split)
    fix = r"split the text into more documents (--separator '\n\n')"
    check_no_split_is_empty(splits, shares, options.holdout, options.split, fix)
