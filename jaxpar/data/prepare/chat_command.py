"""Prepare a dataset of conversations: `python -m jaxpar.data prepare-chat`."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from jaxpar.data.formats.meta import TRAIN, Meta
from jaxpar.data.formats.rows import RowCounts
from jaxpar.data.formats.writer import SplitWriter, whole_folder, write_meta
from jaxpar.data.options import PrepareChatOptions
from jaxpar.data.prepare.chat import ChatEncoder, check_messages
from jaxpar.data.prepare.documents import InputFile
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.records import find_json, finish_records, read_records, record_borders
from jaxpar.data.prepare.splits import check_no_split_is_empty, place_of, shares_of
from jaxpar.data.tokenizer import Tokenizer, open_tokenizer


def prepare_chat(options: PrepareChatOptions, progress: PreparationProgress | None = None) -> Meta:
    """Write a dataset folder of conversations, each as a document.

    Returns:  the contents of its meta.json.
    Raises:   ConfigError that names an option, or an unusable file and line.
    """
    shares_of(options.holdout, options.split)
    progress = progress or PreparationProgress()
    sources = find_json(options.input, (options.messages_field,), progress.log)
    tokenizer = open_tokenizer(options.tokenizer, options.eos_token)
    encoder = ChatEncoder(options.template, tokenizer)
    with whole_folder(options.output, options.overwrite) as folder:
        return _write(folder, options, sources, encoder, tokenizer, progress)


def _write(
    folder: Path,
    options: PrepareChatOptions,
    sources: Sequence[InputFile],
    encoder: ChatEncoder,
    tokenizer: Tokenizer,
    progress: PreparationProgress,
) -> Meta:
    vocab_size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
    shares = shares_of(options.holdout, options.split)
    writers = {split: SplitWriter(folder, split, vocab_size, eos_id) for split in shares.splits}
    total, rows = sum(source.num_bytes for source in sources), RowCounts(options.on_bad_row)
    parse = functools.partial(check_messages, field=options.messages_field)
    read = functools.partial(read_records, sources, lambda record, at: parse(record, where=at))
    keys = (json.dumps(messages) for messages, _ in read(RowCounts(options.on_bad_row)))
    borders = record_borders(keys, shares, progress)
    for messages, position in read(rows):
        split = borders.split(place_of(json.dumps(messages)))
        writers[split].append_conversation(*encoder.encode(messages))
        num_tokens = sum(writer.num_tokens for writer in writers.values())
        progress.advance(position, total, num_tokens)
    splits = {split: writer.close() for split, writer in writers.items()}
    finish_records(rows, options.input, progress)
    fix = "use more conversations"
    check_no_split_is_empty(splits, shares, options.holdout, options.split, fix)
    train, inputs = writers[TRAIN], options.input
    return write_meta(
        folder, tokenizer, train, splits, inputs, *shares, template=options.template, rows=rows
    )
