"""Prepare a dataset of conversations or of pairs of responses (`prepare-chat`, `prepare-pairs`).

A pair is two documents: the chosen and the rejected one. Pairs of one prompt are in one split.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.config import ConfigError
from jaxpar.data.formats.compressed import BadRow, RowCounts, reading
from jaxpar.data.formats.json_file import json_records
from jaxpar.data.formats.meta import PAIRS, Meta
from jaxpar.data.options import PrepareChatOptions, PreparePairsOptions
from jaxpar.data.prepare.chat import ChatEncoder, Conversation, check_messages
from jaxpar.data.prepare.documents import InputFile, Wanted, find_sources
from jaxpar.data.prepare.encoding import encoded
from jaxpar.data.prepare.pairs import encode_pair, read_pair
from jaxpar.data.prepare.parts import Report, Task, WrittenPart, prepare_parts
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.splits import Borders, find_borders, place_of, shares_of
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
            for text, record in json_records(file, source.path, rows, source.span):
                try:
                    value = parse(record, text.where)
                except BadRow as error:
                    rows.bad(error)
                    continue
                rows.num_good += 1
                yield value, before + file.tell() - (source.span.start if source.span else 0)
        before += source.num_bytes


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

    def place(self, record: Any) -> int:
        """Return the place of a record, which decides its split."""
        return place_of(json.dumps(self.key(record)))


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
) -> Meta | None:
    """Write a dataset folder, or a part of it.

    Returns:  the contents of its meta.json; None if other parts are missing.
    Raises:   ConfigError that names an option, or an unusable file and line.
    """
    return prepare_parts(RecordCorpus(options), progress or PreparationProgress())


@dataclass(frozen=True)
class RecordCorpus:
    """Conversations or pairs that are prepared, as a `parts.Corpus`."""

    options: PrepareChatOptions | PreparePairsOptions
    in_one_part = False

    @property
    def fix(self) -> str:
        """How to get documents into every split."""
        return f"use more {_kind(self.options).plural}"

    @property
    def more(self) -> dict[str, Any]:
        """Fields of `Meta`."""
        return {"kind": _kind(self.options).name, "template": self.options.template}

    def files(self, log: Callable[[str], None]) -> list[InputFile]:
        """Return the files of the input."""
        return find_json(self.options.input, _kind(self.options).fields, log)

    def tokenizer(self, files: Sequence[InputFile], log: Callable[[str], None]) -> Tokenizer:
        """Open the tokenizer, and look up the template's tokens."""
        tokenizer = open_tokenizer(self.options.tokenizer, self.options.eos_token)
        ChatEncoder(self.options.template, tokenizer)
        return tokenizer

    def borders(self, files: Sequence[InputFile]) -> Borders:
        """Return the borders of the splits."""
        kind, rows = _kind(self.options), RowCounts(self.options.on_bad_row)
        places = (kind.place(record) for record, _ in read_records(files, kind.parse, rows))
        return find_borders(places, shares_of(self.options.holdout, self.options.split))

    def write(self, task: Task, folder: Path, report: Report) -> WrittenPart:
        """Write a part."""
        options, kind, rows = self.options, _kind(self.options), RowCounts(self.options.on_bad_row)
        writers = task.writers(folder)
        items = (
            (found, found[0], RECORD_CHARS) for found in read_records(task.files, kind.parse, rows)
        )
        encode = functools.partial(encode_records, options, task.tokenizer)
        for (record, position), conversations in encoded(items, encode, task.workers):
            writer = writers[task.borders.split(kind.place(record))]
            for conversation in conversations:
                writer.append_conversation(*conversation)
            report((position, sum(writer.num_tokens for writer in writers.values())))
        return WrittenPart.of(writers, rows)


#: Characters that a record is taken for, when records are put into batches.
RECORD_CHARS = 1 << 12


def encode_records(
    options: PrepareChatOptions | PreparePairsOptions, tokenizer: Tokenizer, records: Sequence[Any]
) -> list[Sequence[Conversation]]:
    """Return the conversations of records."""
    kind, encoder = _kind(options), ChatEncoder(options.template, tokenizer)
    return [kind.encode(record, encoder) for record in records]
