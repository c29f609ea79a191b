"""Checks that a tokenizer.json can be used."""

from pathlib import Path
from typing import Any

import tokenizers

from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.data.formats.meta import MAX_VOCAB_SIZE

#: Limit on the bytes of a tokenizer.json. Gemma 3's, with 262,144 tokens, has 33 MB.
MAX_FILE_BYTES = 64 << 20

#: A text with characters, spaces and scripts that a vocabulary may lack.
TEXT = "a The quick brown fox, 123!\n\té 日本 👩\u200d🔬 \u0000"


class UnusableTokenizer(ValueError):
    """A tokenizer.json that cannot be used. The message is one line and does not name the file."""


def read_checked(path: str | Path) -> str:
    """Return the text of a tokenizer.json that the library can load.

    Raises:   UnusableTokenizer if it is not JSON within the limits, has an id that is negative or
              above MAX_VOCAB_SIZE, or cannot be loaded and used; OSError if the file cannot be
              read.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    try:
        _check_ids(read_json_object(data, what="it", max_bytes=MAX_FILE_BYTES))
    except UnreadableJson as error:
        raise UnusableTokenizer(str(error)) from error
    text = data.decode("utf-8")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
        for special in (True, False):
            tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=special).ids)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise UnusableTokenizer(" ".join(str(error).split()) or type(error).__name__) from error
    return text


def _check_ids(values: dict[str, Any]) -> None:
    """Raise UnusableTokenizer for ids that are no rows of an embedding.

    The size of the vocabulary is one more than the largest id, and arrays have that size.
    """
    model, added = values.get("model"), values.get("added_tokens")
    if not isinstance(model, dict):
        raise UnusableTokenizer("it has no model")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        for token, number in vocabulary.items():
            _check_id(token, number)
    elif not isinstance(vocabulary, list):
        raise UnusableTokenizer("its model has no vocab")
    elif len(vocabulary) > MAX_VOCAB_SIZE:
        raise UnusableTokenizer(f"it has {len(vocabulary):,} tokens")
    if not vocabulary and not added:
        raise UnusableTokenizer("it has no tokens")
    if not isinstance(added, list | None):
        raise UnusableTokenizer("its added_tokens are not a list")
    for token in added or ():
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise UnusableTokenizer(f"its added_tokens have {str(token)[:80]!r}, without content")
        _check_id(token["content"], token.get("id"))


def _check_id(token: str, number: Any) -> None:
    if type(number) is not int or not 0 <= number < MAX_VOCAB_SIZE:
        rule = f"not an integer from 0 to {MAX_VOCAB_SIZE - 1:,}"
        raise UnusableTokenizer(f"its token {token[:80]!r} has the id {str(number)[:40]}, {rule}")
