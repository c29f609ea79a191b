"""Prepare a dataset of pairs of responses: `python -m jaxpar.data prepare-pairs`."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from jaxpar.data.formats.meta import PAIRS, TRAIN, Meta
from jaxpar.data.formats.rows import RowCounts
from jaxpar.data.formats.writer import SplitWriter, whole_folder, write_meta
from jaxpar.data.options import PreparePairsOptions
from jaxpar.data.prepare.chat import ChatEncoder
from jaxpar.data.prepare.documents import InputFile
from jaxpar.data.prepare.pairs import encode_pair, read_pair
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.records import find_json, finish_records, read_records, record_borders
from jaxpar.data.prepare.splits import check_no_split_is_empty, place_of, shares_of
from jaxpar.data.tokenizer import Tokenizer, open_tokenizer


def prepare_pairs(
    options: PreparePairsOptions, progress: PreparationProgress | None = None
) -> Meta:
    """Write a dataset folder of pairs, each as two documents: the chosen and the rejected one.

    Pairs of one prompt are all in the same split.

    Returns:  the contents of its meta.json.
    Raises:   ConfigError that names an option, or an unusable file and line.
    """
    shares_of(options.holdout, options.split)
    progress = progress or PreparationProgress()
    fields = options.chosen_field, options.rejected_field
    sources = find_json(options.input, fields, progress.log)
    tokenizer = open_tokenizer(options.tokenizer, options.eos_token)
    encoder = ChatEncoder(options.template, tokenizer)
    with whole_folder(options.output, options.overwrite) as folder:
        return _write(folder, options, sources, encoder, tokenizer, progress)


def _write(
    folder: Path,
    options: PreparePairsOptions,
    sources: Sequence[InputFile],
    encoder: ChatEncoder,
    tokenizer: Tokenizer,
    progress: PreparationProgress,
) -> Meta:
    vocab_size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
    shares = shares_of(options.holdout, options.split)
    writers = {split: SplitWriter(folder, split, vocab_size, eos_id) for split in shares.splits}
    fields = options.prompt_field, options.chosen_field, options.rejected_field
    total, rows = sum(source.num_bytes for source in sources), RowCounts(options.on_bad_row)
    read = functools.partial(read_records, sources, lambda line, at: read_pair(line, fields, at))
    keys = (json.dumps(pair.prompt) for pair, _ in read(RowCounts(options.on_bad_row)))
    borders = record_borders(keys, shares, progress)
    for pair, position in read(rows):
        writer = writers[borders.split(place_of(json.dumps(pair.prompt)))]
        for conversation in encode_pair(pair, encoder):
            writer.append_conversation(*conversation)
        num_tokens = sum(writer.num_tokens for writer in writers.values())
        progress.advance(position, total, num_tokens)
    splits = {split: writer.close() for split, writer in writers.items()}
    finish_records(rows, options.input, progress)
    fix = "use more pairs"
    check_no_split_is_empty(splits, shares, options.holdout, options.split, fix)
    train, inputs = writers[TRAIN], options.input
    return write_meta(
        folder,
        tokenizer,
        train,
        splits,
        inputs,
        *shares,
        kind=PAIRS,
        template=options.template,
        rows=rows,
    )
