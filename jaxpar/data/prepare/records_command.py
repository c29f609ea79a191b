"""Prepare a dataset of conversations or of pairs of responses (`prepare-chat`, `prepare-pairs`).

A pair is two documents: the chosen and the rejected one. Pairs of one prompt are in one split.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.config import ConfigError
from jaxpar.data.formats.compressed import BadRow, RowCounts, reading
from jaxpar.data.formats.json_file import json_records
from jaxpar.data.formats.meta import PAIRS, TRAIN, Meta
from jaxpar.data.formats.writer import SplitWriter, whole_folder, write_meta
from jaxpar.data.options import PrepareChatOptions, PreparePairsOptions
from jaxpar.data.prepare.chat import ChatEncoder, Conversation, check_messages
from jaxpar.data.prepare.documents import InputFile, Wanted, find_sources
from jaxpar.data.prepare.pairs import encode_pair, read_pair
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.splits import (
    Borders,
    Shares,
    check_no_split_is_empty,
    find_borders,
    in_words,
    place_of,
    shares_of,
)
from jaxpar.data.tokenizer import Tokenizer, open_tokenizer


def find_json(
    inputs: Sequence[str], fields: tuple[str, ...], log: Callable[[str], None]
) -> list[InputFile]:
    """Find the files of the option --input.

    Raises:   ConfigError if there is none, or if one is not JSON.
    """
    if not inputs:
        raise ConfigError("--input", "", "must not be empty", "use .jsonl files")
    return find_sources(inputs, Wanted(fields=fields, json_only=True, by_name=True), log)


def read_records[Value](
    sources: Sequence[InputFile], parse: Callable[[Any, str], Value], rows: RowCounts
) -> Iterator[tuple[Value, int]]:
    """Yield what `parse` makes of each record, given its file and line.

    Returns:  pairs of a value and the bytes of input read so far.
    Raises:   ConfigError for a file that cannot be read, or a bad row.
    """
    before = 0
    for source in sources:
        with reading(source.path), source.path.open("rb") as file:
            for text, record in json_records(file, source.path, rows):
                try:
                    value = parse(record, text.where)
                except BadRow as error:
                    rows.bad(error)
                    continue
                rows.num_good += 1
                yield value, before + file.tell()
        before += source.num_bytes


def record_borders(keys: Iterator[str], shares: Shares, progress: PreparationProgress) -> Borders:
    """Return the borders of the splits.

    Args:     keys: the texts whose hash decides about each record.
    """
    borders = find_borders(map(place_of, keys), shares)
    if line := in_words(borders, shares):
        progress.log(line)
    return borders


def finish_records(rows: RowCounts, inputs: Sequence[str], progress: PreparationProgress) -> None:
    """Report the rows that were left out.

    Raises:   ConfigError if these are all rows.
    """
    rows.check(" ".join(inputs))
    for line in rows.lines():
        progress.log(line)


class _Kind(NamedTuple):
    """What a line is."""

    name: str
    """As in `Meta.kind`."""
    plural: str
    fields: tuple[str, ...]
    """JSON fields by which a file is known."""
    parse: Callable[[Any, str], Any]
    key: Callable[[Any], Any]
    """What decides the split of a record."""
    encode: Callable[[Any, ChatEncoder], Sequence[Conversation]]


def _kind(options: PrepareChatOptions | PreparePairsOptions) -> _Kind:
    if isinstance(options, PrepareChatOptions):
        return _Kind(
            name="",
            plural="conversations",
            fields=(options.messages_field,),
            parse=functools.partial(check_messages, options.messages_field),
            key=lambda messages: messages,
            encode=lambda messages, encoder: [encoder.encode(messages)],
        )
    fields = options.prompt_field, options.chosen_field, options.rejected_field
    parse = functools.partial(read_pair, fields)
    return _Kind(PAIRS, "pairs", fields[1:], parse, lambda pair: pair.prompt, encode_pair)


def prepare_records(
    options: PrepareChatOptions | PreparePairsOptions, progress: PreparationProgress | None = None
) -> Meta:
    """Write a dataset folder.

    Returns:  the contents of its meta.json.
    Raises:   ConfigError that names an option, or an unusable file and line.
    """
    shares_of(options.holdout, options.split)
    progress = progress or PreparationProgress()
    kind = _kind(options)
    sources = find_json(options.input, kind.fields, progress.log)
    tokenizer = open_tokenizer(options.tokenizer, options.eos_token)
    encoder = ChatEncoder(options.template, tokenizer)
    with whole_folder(options.output, options.overwrite) as folder:
        return _write(folder, options, kind, sources, encoder, tokenizer, progress)


def _write(
    folder: Path,
    options: PrepareChatOptions | PreparePairsOptions,
    kind: _Kind,
    sources: Sequence[InputFile],
    encoder: ChatEncoder,
    tokenizer: Tokenizer,
    progress: PreparationProgress,
) -> Meta:
    vocab_size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
    shares = shares_of(options.holdout, options.split)
    writers = {split: SplitWriter(folder, split, vocab_size, eos_id) for split in shares.splits}
    total, rows = sum(source.num_bytes for source in sources), RowCounts(options.on_bad_row)
    read = functools.partial(read_records, sources, kind.parse)
    text = lambda record: json.dumps(kind.key(record))  # noqa: E731
    keys = (text(record) for record, _ in read(RowCounts(options.on_bad_row)))
    borders = record_borders(keys, shares, progress)
    for record, position in read(rows):
        writer = writers[borders.split(place_of(text(record)))]
        for conversation in kind.encode(record, encoder):
            writer.append_conversation(*conversation)
        num_tokens = sum(writer.num_tokens for writer in writers.values())
        progress.advance(position, total, num_tokens)
    splits = {split: writer.close() for split, writer in writers.items()}
    finish_records(rows, options.input, progress)
    fix = f"use more {kind.plural}"
    check_no_split_is_empty(splits, shares, options.holdout, options.split, fix)
    return write_meta(
        folder,
        tokenizer,
        writers[TRAIN],
        splits,
        options.input,
        *shares,
        kind=kind.name,
        template=options.template,
        rows=rows,
    )
