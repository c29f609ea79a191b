"""Prepare a dataset of text: read documents, hold some out, encode them, write a dataset.

The result depends only on the documents and the options, not on the number of processes or parts.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.numerals import only_digits
from jaxpar.data.formats.compressed import RowCounts
from jaxpar.data.formats.meta import TRAIN, Meta
from jaxpar.data.formats.readers import PIECE_CHARS, ReadOptions
from jaxpar.data.formats.writer import SplitWriter, TextPart
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.documents import InputFile, Wanted, find_sources, read_pieces
from jaxpar.data.prepare.encoding import encoded
from jaxpar.data.prepare.parts import Report, Task, WrittenPart, prepare_parts
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.remote import is_remote
from jaxpar.data.prepare.splits import Borders, assign_splits, shares_of, text_borders
from jaxpar.data.stream.writing import IndexWriter, begin_index, cut_text, finish_index, one_part
from jaxpar.data.tokenizer import BPE, ByteTokenizer, Tokenizer, open_tokenizer, train_bpe

#: Maximum digits of N, since `tokenizers` allocates memory for N tokens and accepts 64 bits.
BPE_DIGITS = 8


def prepare(options: PrepareOptions, progress: PreparationProgress | None = None) -> Meta | None:
    """Write a dataset folder, or a part of it.

    Returns:  the contents of its meta.json; None if other parts are missing.
    Raises:   ConfigError that names an option, or an unreadable file and line.
    """
    _check(options)
    return prepare_parts(TextCorpus(options), progress or PreparationProgress())


@dataclass(frozen=True)
class TextCorpus:
    """The text that `prepare` prepares, as a `parts.Corpus`."""

    options: PrepareOptions
    fix = r"split the text into more documents (--separator '\n\n')"
    more: ClassVar[dict[str, Any]] = {}

    @property
    def in_one_part(self) -> bool:
        """Whether there can be one part only."""
        return self.options.stream

    def files(self, log: Callable[[str], None]) -> list[InputFile]:
        """Return the files of the input."""
        wanted = Wanted(self.options.extension, (self.options.text_field,))
        return find_sources(self.options.input, wanted, log)

    def tokenizer(self, files: Sequence[InputFile], log: Callable[[str], None]) -> Tokenizer:
        """Open or train the tokenizer."""
        return _make_tokenizer(self.options, files, log)

    def borders(self, files: Sequence[InputFile]) -> Borders:
        """Return the borders of the splits."""
        return _borders(files, self.options)

    def write(self, task: Task, folder: Path, report: Report) -> WrittenPart:
        """Write a part."""
        options, read = self.options, _read_options(self.options)
        pieces = assign_splits(read_pieces(task.files, read), task.borders, read.rows)
        index = begin_index(folder, task.files, options.text_field) if options.stream else None
        writers = task.writers(folder, IndexWriter if options.stream else SplitWriter)
        cut = cut_text if options.stream else one_part
        encode = functools.partial(encode_texts, task.tokenizer, cut)
        items = ((one, one.piece.text, len(one.piece.text)) for one in pieces)
        for (split, piece), parts in encoded(items, encode, task.workers):
            writers[split].append(piece, parts)
            report((piece.position, sum(writer.num_tokens for writer in writers.values())))
        written = WrittenPart.of(writers, read.rows)
        if index is not None:
            finish_index(index, list(writers))
        return written


def encode_texts(
    tokenizer: Tokenizer,
    cut: Callable[[str, np.ndarray, Tokenizer], list[TextPart]],
    texts: Sequence[str],
) -> list[list[TextPart]]:
    """Return the parts of texts with their tokens."""
    encoded = tokenizer.encode_batch(texts)
    return [cut(text, ids, tokenizer) for text, ids in zip(texts, encoded, strict=True)]


def _check(options: PrepareOptions) -> None:
    named = options.tokenizer == ByteTokenizer.kind or options.tokenizer.startswith(BPE)
    if options.eos_token is not None and named:
        rule = f"needs a tokenizer.json, but --tokenizer is {options.tokenizer}"
        raise ConfigError("--eos-token", options.eos_token, rule, "remove it")
    if options.separator == "":
        raise ConfigError("--separator", "", "must not be empty", r"use a text such as '\n\n'")
    if options.stream and (name := next(filter(is_remote, options.input), None)):
        rule = "needs the text on this host, where training reads it"
        raise ConfigError("--stream", name, rule, "leave out --stream, or mount it as a folder")
    if options.stream and options.parts > 1:
        rule = "cannot go with --stream, whose index is one part"
        raise ConfigError("--parts", options.parts, rule, "remove it")


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
    options: PrepareOptions, sources: Sequence[InputFile], log: Callable[[str], None]
) -> Tokenizer:
    spec = options.tokenizer
    if spec.startswith(BPE) and only_digits(spec.removeprefix(BPE)):
        if len(spec.removeprefix(BPE)) > BPE_DIGITS:
            rule = f"has a vocabulary of more than {BPE_DIGITS} digits"
            raise ConfigError("--tokenizer", spec[:60], rule, f"use {BPE}8192")
        log(f"training a tokenizer, {spec}")
        bpe = train_bpe(_sample(sources, options), asked := int(spec.removeprefix(BPE)))
        if bpe.vocab_size < asked:
            log(f"the text has no more pairs to merge; using {bpe.vocab_size:,} tokens")
        return bpe
    return open_tokenizer(spec, options.eos_token, trains=True)


def _sample(sources: Sequence[InputFile], options: PrepareOptions) -> Iterator[str]:
    """Yield training text of all files in a fixed random order, with about equal shares."""
    order, borders = list(sources), _borders(sources, options)
    random.Random(0).shuffle(order)
    share = max(options.tokenizer_sample // len(order), PIECE_CHARS)
    shares = (_up_to(share, _training_texts(source, options, borders)) for source in order)
    return _up_to(options.tokenizer_sample, itertools.chain.from_iterable(shares))


def _training_texts(source: InputFile, options: PrepareOptions, borders: Borders) -> Iterator[str]:
    pieces = assign_splits(read_pieces([source], _read_options(options)), borders)
    return (piece.text for split, piece in pieces if split == TRAIN)


def _up_to(num_chars: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text[:num_chars]
        num_chars -= len(text)
        if num_chars <= 0:
            return
