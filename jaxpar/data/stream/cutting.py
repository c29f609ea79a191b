"""Cuts a text into parts that can be tokenized alone: their tokens in a row are those of the text.

Whether that holds at a place depends on the tokenizer, so each part is tokenized and compared. A
place between a word and the space before the next one is fine for byte-level tokenizers. Those that
put a space before each text, such as Llama 2's, need the space left out.
"""

import re
from collections.abc import Sequence

import numpy as np

from jaxpar.data.formats.writer import TextPart
from jaxpar.data.tokenizer import Tokenizer

#: Characters of a part to aim at, about a thousand tokens of English.
PART_CHARS = 4096

#: How often to look for other places in a text that cannot be cut at some.
TRIES = 4

#: Places to cut at: before a space in front of a word, or after a line end in front of a word.
_PLACE = re.compile(r"(?<=\S) (?=[^\W\d_])|(?<=\n)(?=[^\W\d_])")


def one_part(text: str, ids: np.ndarray, tokenizer: Tokenizer) -> list[TextPart]:
    """Return a text as one part."""
    return [TextPart(0, len(text), ids)]


def cut_text(
    text: str, ids: np.ndarray, tokenizer: Tokenizer, tries: int = TRIES
) -> list[TextPart]:
    """Cut a text into parts of about PART_CHARS characters, where the tokenizer allows it.

    Args:     ids: int32 [tokens], of the text. tries: how often to cut what is left at other
              places.
    Returns:  parts in order whose tokens, in a row, are `ids`. Only spaces may lie between them.
    """
    if len(text) <= PART_CHARS or not tries:
        return [TextPart(0, len(text), ids)]
    for leave_out_space in (False, True):
        spans = _spans(text, leave_out_space)
        encoded = tokenizer.encode_batch([text[first:end] for first, end in spans])
        front = _matches(encoded, ids)
        if front == len(spans):
            return [
                TextPart(first, end - first, part)
                for (first, end), part in zip(spans, encoded, strict=True)
            ]
        back = min(_matches(encoded[::-1], ids, from_end=True), len(spans) - front - 1)
        found = _around(text, ids, tokenizer, spans, encoded, (front, back), tries)
        if found:
            return found
    return [TextPart(0, len(text), ids)]


def _around(
    text: str,
    ids: np.ndarray,
    tokenizer: Tokenizer,
    spans: Sequence[tuple[int, int]],
    encoded: Sequence[np.ndarray],
    ends: tuple[int, int],
    tries: int,
) -> list[TextPart] | None:
    """Keep parts at both ends whose tokens are right, and cut the text between them elsewhere."""
    for wider in (0, 1, 4):  # the part before a wrong place may look right
        head, tail = (max(end - wider, 0) for end in ends)
        if head + tail == 0:
            return None
        first, end = spans[head][0], spans[len(spans) - tail - 1][1]
        skipped = sum(map(len, encoded[:head]))
        stop = len(ids) - sum(map(len, encoded[len(spans) - tail :]))
        wanted = ids[skipped:stop]
        if np.array_equal(tokenizer.encode(text[first:end]), wanted):
            inner = cut_text(text[first:end], wanted, tokenizer, tries - 1)
            kept = [TextPart(a, b - a, part) for (a, b), part in zip(spans, encoded, strict=True)]
            middle = [part._replace(first=part.first + first) for part in inner]
            return [*kept[:head], *middle, *kept[len(spans) - tail :]]
    return None


def _spans(text: str, leave_out_space: bool) -> list[tuple[int, int]]:
    """Return the first character and the end of each part."""
    spans, first = [], 0
    while len(text) - first > PART_CHARS:
        place = _PLACE.search(text, first + PART_CHARS // 2, first + 2 * PART_CHARS)
        if place is None:
            place = _PLACE.search(text, first + 2 * PART_CHARS)
        if place is None:
            break
        spans.append((first, place.start()))
        first = place.end() if leave_out_space else place.start()
    return [*spans, (first, len(text))]


def _matches(encoded: Sequence[np.ndarray], ids: np.ndarray, from_end: bool = False) -> int:
    """Return how many parts in a row, from one end, have the tokens of the text there."""
    at = 0
    for number, part in enumerate(encoded):
        end = at + len(part)
        found = ids[len(ids) - end : len(ids) - at] if from_end else ids[at:end]
        if end > len(ids) or not np.array_equal(part, found):
            return number
        at = end
    return len(encoded) if at == len(ids) else len(encoded) - 1
