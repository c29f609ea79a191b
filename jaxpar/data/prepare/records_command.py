"""Prepare a dataset of conversations or of pairs of responses (`prepare-chat`, `prepare-pairs`).

A pair is two documents: the chosen and the rejected one. Pairs of one prompt are in one split.
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.data.formats.meta import PAIRS, TRAIN, Meta
from jaxpar.data.formats.rows import RowCounts
from jaxpar.data.formats.writer import SplitWriter, whole_folder, write_meta
from jaxpar.data.options import PrepareChatOptions, PreparePairsOptions
from jaxpar.data.prepare.chat import ChatEncoder, Conversation, check_messages
from jaxpar.data.prepare.documents import InputFile
from jaxpar.data.prepare.pairs import encode_pair, read_pair
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.records import find_json, finish_records, read_records, record_borders
from jaxpar.data.prepare.splits import check_no_split_is_empty, place_of, shares_of
from jaxpar.data.tokenizer import Tokenizer, open_tokenizer


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
