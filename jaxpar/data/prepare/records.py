"""Reads records of chat data and pairs, which are objects of JSON Lines."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.data.formats.json_file import json_records
from jaxpar.data.formats.rows import BadRow, RowCounts, reading
from jaxpar.data.prepare.documents import InputFile, Wanted, find_sources
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.splits import Borders, Shares, find_borders, in_words, place_of


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
