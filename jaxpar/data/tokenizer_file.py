"""Checks a tokenizer.json before the `tokenizers` library reads it in this process."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.data import tokenizer_probe
from jaxpar.data.formats.meta import MAX_VOCAB_SIZE

#: Limit on the bytes of a tokenizer.json. Gemma 3's, with 262,144 tokens, has 33 MB.
MAX_FILE_BYTES = 64 << 20


#: Hashes of the files that this process has checked.
_checked: set[bytes] = set()


class UnusableTokenizer(ValueError):
    """A tokenizer.json that cannot be used. The message is one line and does not name the file."""


def read_checked(path: str | Path) -> str:
    """Return the text of a tokenizer.json, after a child process has loaded and used it.

    Raises:   UnusableTokenizer if it is not JSON within the limits, has an id that is negative or
              above MAX_VOCAB_SIZE, or cannot be loaded or used within limits of memory and time;
              OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    digest = hashlib.sha256(data).digest()
    if digest not in _checked:
        _check(data)
        _checked.add(digest)
    return data.decode("utf-8")


def _check(data: bytes) -> None:
    try:
        _check_ids(read_json_object(data, what="it", max_bytes=MAX_FILE_BYTES))
    except UnreadableJson as error:
        raise UnusableTokenizer(str(error)) from error
    why = _probe(data)
    if why:
        raise UnusableTokenizer(why)


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


def _probe(data: bytes) -> str:
    """Use the tokenizer in a child process. Returns the error, or ""."""
    # -I: without the directory of the script, whose files would shadow modules.
    command = [sys.executable, "-I", tokenizer_probe.__file__]
    environment = {**os.environ, "RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
    seconds = tokenizer_probe.MAX_SECONDS + 5  # also if it waits
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, env=environment, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"the tokenizers library was not done with it after {seconds} s"
    if done.returncode == 0:
        return done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == -signal.SIGXCPU:
        return f"the tokenizers library needs more than {tokenizer_probe.MAX_SECONDS} s for it"
    told = done.stderr.decode("utf-8", "replace").split("\n")
    reasons = [line for line in told if line.strip()]
    why = f": {reasons[-1].strip()}" if reasons else ""
    return f"the tokenizers library ended with code {done.returncode}{why}"
