"""Tokenizers: plain bytes, any Hugging Face tokenizer.json, or a BPE trained on the input.

The name of a special token in a document is encoded as ordinary characters, so a document cannot
forge an end of text. Callers append the end of text (`eos_id`), and prepend `begin` to prompts.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.data.formats.meta import (
    BYTES,
    JSON,
    MAX_VOCAB_SIZE,
    META_FILE,
    NO_TOKENIZER,
    TOKENIZER_FILE,
    read_meta,
)
from jaxpar.runtime import hub

# --------------------------------------------------------- Checks that a tokenizer.json can be used


#: Limit on the bytes of a tokenizer.json. Gemma 3's, with 262,144 tokens, has 33 MB.
MAX_FILE_BYTES = 64 << 20

#: A text with characters, spaces and scripts that a vocabulary may lack.
PROBE = "a The quick brown fox, 123!\n\té 日本 👩\u200d🔬 \u0000"


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
            tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=special).ids)
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


EOS_TOKEN = "<|endoftext|>"

#: End-of-text tokens of published base models (GPT-2 and Qwen, Llama 3, Llama 2, Gemma, Kimi,
#: DeepSeek).
KNOWN_EOS_TOKENS = (
    EOS_TOKEN,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)

#: `--tokenizer bpe:N` trains a BPE of N tokens.
BPE = "bpe:"

#: The file beside a published tokenizer.json that names its special tokens.
CONFIG_FILE = "tokenizer_config.json"


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    kind: str
    vocab_size: int
    eos_id: int
    eos_token: str
    fingerprint: str
    begin: tuple[int, ...]
    """Ids that `transformers` prepends to a text: a begin-of-text token (Llama 3), or nothing."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a special token by its text, or None."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int32 [tokens], without an end of text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text. Releases the GIL, so that threads can run it."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:   ValueError for an id outside the vocabulary.
        """
        ...

    def save(self, folder: str | Path) -> None:
        """Write what `load_tokenizer` needs besides meta.json."""
        ...


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes, ids 0 to 255, and the end of text, 256."""

    kind = BYTES
    vocab_size = 257
    eos_id = 256
    eos_token = EOS_TOKEN
    fingerprint = hashlib.sha256(b"bytes 0-255, end of text 256").hexdigest()
    begin: tuple[int, ...] = ()

    def id_of(self, token: str) -> int | None:
        """Id of the end of text, the only special token."""
        return self.eos_id if token == self.eos_token else None

    def encode(self, text: str) -> np.ndarray:
        """Bytes of the text, int32 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Raises ValueError for an id outside the vocabulary."""
        ids = _checked_ids(ids, self.vocab_size)
        # Split at the end of text, so that a truncated character before it does not absorb it.
        runs = np.split(ids, np.flatnonzero(ids == self.eos_id))
        texts = [bytes(run[run != self.eos_id].tolist()).decode("utf-8", "replace") for run in runs]
        return self.eos_token.join(texts)

    def save(self, folder: str | Path) -> None:
        """Write nothing, since meta.json says "bytes"."""


class JsonTokenizer:
    """A tokenizer of the `tokenizers` library, from a tokenizer.json."""

    kind = JSON

    def __init__(self, json_text: str, eos_token: str):
        self.json_text = json_text
        self._tokenizer = tokenizers.Tokenizer.from_str(json_text)
        # A published file may enable truncation or padding, which would damage a corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        # Not get_vocab_size(), which is the number of ids: they may have gaps.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        eos_id = self._tokenizer.token_to_id(eos_token)
        if eos_id is None:
            raise ValueError(f"the tokenizer has no token {eos_token!r}")
        self.eos_id, self.eos_token = eos_id, eos_token
        self.fingerprint = hashlib.sha256(json_text.encode()).hexdigest()
        self.begin = self._ids_before_text()

    def __reduce__(self) -> tuple:
        return type(self), (self.json_text, self.eos_token)

    def _ids_before_text(self) -> tuple[int, ...]:
        """Return the ids that the file's post-processor prepends. transformers 5 uses only those,
        regardless of `add_bos_token` in tokenizer_config.json."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        added = encoding.special_tokens_mask
        return tuple(encoding.ids[: added.index(0)]) if 0 in added else ()

    def id_of(self, token: str) -> int | None:
        """Id of a token by its text; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int32 [tokens], without special tokens."""
        return self.encode_batch([text])[0]

    def parsing_special_tokens(self) -> tokenizers.Tokenizer:
        """The library's tokenizer of the same file, for texts that name special tokens."""
        found = tokenizers.Tokenizer.from_str(self.json_text)
        found.no_truncation()
        found.no_padding()
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text."""
        try:
            # `encode` keeps the GIL; `encode_batch_fast` releases it and skips character offsets.
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # an unknown character, or a panic, which is no Exception
            why = " ".join(str(error).split())
            rule, fix = f"cannot encode a text: {why}", "use the tokenizer as it was published"
            raise ConfigError("--tokenizer", TOKENIZER_FILE, rule, fix) from error
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Raises ValueError for an id outside the vocabulary."""
        ids = _checked_ids(ids, self.vocab_size)
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer.json, identical to the one that was read."""
        (Path(folder) / TOKENIZER_FILE).write_text(self.json_text, "utf-8", newline="")


def _checked_ids(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    checked = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
    outside = checked[(checked < 0) | (checked >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"token id {outside[0]} is outside the tokenizer's vocabulary of {vocab_size}: "
            "mask the padded rows of the embedding before sampling"
        )
    return checked


def read_tokenizer_json(
    path: str | Path, eos: str | int | None = None, eos_option: str = "--eos-token"
) -> JsonTokenizer:
    """Read a Hugging Face tokenizer.json.

    Args:     eos: text or id of the end-of-text token. None: that of the tokenizer_config.json in
              the same folder, or else the special token that is one of `KNOWN_EOS_TOKENS`.
              eos_option: the command's option for it, for errors.
    Raises:   ConfigError if it cannot be read, or if the end of text is unknown or ambiguous.
    """
    try:
        json_text = read_checked(path)
        vocabulary = tokenizers.Tokenizer.from_str(json_text).get_vocab(with_added_tokens=True)
    except Exception as error:  # `tokenizers` raises bare Exceptions.
        fix = "use a tokenizer.json that the `tokenizers` library can read"
        raise ConfigError("--tokenizer", str(path), f"cannot be read: {error}", fix) from error
    if isinstance(eos, int):
        texts = [token for token, number in vocabulary.items() if number == eos]
        if not texts:
            rule = f"is not a token of {path}"
            raise ConfigError(eos_option, eos, rule, "use the id of its end-of-text token")
        return JsonTokenizer(json_text, texts[0])
    if eos is None:
        eos = _eos_of_config(Path(path).with_name(CONFIG_FILE), vocabulary, eos_option)
    if eos is not None:
        if eos not in vocabulary:
            rule = f"must have an end-of-text token, but has none of {eos}"
            raise ConfigError("--tokenizer", str(path), rule, f"select one with {eos_option}")
        return JsonTokenizer(json_text, eos)
    # An ordinary entry may have the same text: Gemma 3 and Qwen3 have an ordinary </s>.
    added = json.loads(json_text).get("added_tokens") or ()
    special = {token["content"] for token in added if token.get("special")}
    found = [token for token in KNOWN_EOS_TOKENS if token in special]
    if len(found) != 1:
        rule = f"must have exactly one end-of-text token, but has {len(found)}: {', '.join(found)}"
        if not found:
            tried = ", ".join(KNOWN_EOS_TOKENS)
            rule = f"must have an end-of-text token, but has none of {tried} as a special token"
        raise ConfigError("--tokenizer", str(path), rule, f"select one with {eos_option}")
    return JsonTokenizer(json_text, found[0])


def _eos_of_config(path: Path, vocabulary: Mapping[str, int], eos_option: str) -> str | None:
    """Return the end of text that a tokenizer_config.json names; None if it names none.

    Raises:   ConfigError if it cannot be read, or names what is no token.
    """
    if not path.is_file():
        return None
    fix = f"repair it, or select a token with {eos_option}"
    try:
        # `transformers` writes int(1e30) for a maximum length that is not known.
        eos = read_json_object(path, max_digits=40, what="it").get("eos_token")
    except (ValueError, OSError) as error:
        raise ConfigError("--tokenizer", str(path), f"cannot be read: {error}", fix) from error
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is not None and (not isinstance(eos, str) or eos not in vocabulary):
        rule = f"has the eos_token {eos!r}, which is not a token of {TOKENIZER_FILE}"
        raise ConfigError("--tokenizer", str(path), rule, fix)
    return eos


def open_tokenizer(
    spec: str,
    eos: str | int | None = None,
    eos_option: str = "--eos-token",
    *,
    trains: bool = False,
) -> Tokenizer:
    """Open the tokenizer that an option names: `bytes`, a tokenizer.json, its folder, or a model of
    the Hugging Face Hub.

    Args:     eos, eos_option: as in `read_tokenizer_json`. trains: whether the command also accepts
              bpe:N, for errors.
    Raises:   ConfigError("--tokenizer", ...) if it is none of these, or cannot be read.
    """
    if spec == ByteTokenizer.kind:
        return ByteTokenizer()
    rule = f"is neither bytes, nor {'bpe:N, nor ' * trains}a tokenizer.json, nor a model of the Hub"
    fix = f"use {'bpe:8192' if trains else 'bytes'}, or download the tokenizer.json first"
    path = hub.find(spec, "--tokenizer", [TOKENIZER_FILE, CONFIG_FILE], rule, fix).folder
    path = path / TOKENIZER_FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError("--tokenizer", spec, rule, fix)
    return read_tokenizer_json(path, eos, eos_option)


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Train a byte-level BPE on a sample of text, with `EOS_TOKEN` as id 0.

    Args:     vocab_size: upper bound; a small sample has fewer pairs to merge.
    Returns:  a tokenizer that depends only on the texts.
    Raises:   ConfigError if vocab_size is too small for the 256 bytes and the end of text.
    Source:   Radford et al. 2019, section 2.2 (GPT-2's byte-level BPE).
    """
    if vocab_size < 257:
        rule = "must be at least 257, for 256 bytes and the end of text"
        raise ConfigError("--tokenizer", f"bpe:{vocab_size}", rule, "use bpe:257 or more")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return JsonTokenizer(tokenizer.to_str(), EOS_TOKEN)


@dataclass(frozen=True)
class NoTokenizer:
    """What is known of the tokenizer of converted tokens."""

    vocab_size: int
    eos_id: int
    kind = NO_TOKENIZER
    eos_token = fingerprint = ""

    def save(self, folder: str | Path) -> None:
        """Write nothing."""


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a dataset folder.

    Raises:   ConfigError("data.path", ...) if the folder is not a dataset, or its tokenizer.json is
              missing or is not the one that made the tokens.
    """
    meta = read_meta(folder)
    if meta.tokenizer == ByteTokenizer.kind:
        return ByteTokenizer()
    if meta.tokenizer == NO_TOKENIZER:
        fix = "convert it again with --tokenizer"
        raise ConfigError("data.path", str(folder), "was converted without its tokenizer", fix)
    path = Path(folder) / TOKENIZER_FILE
    fix = "copy the original tokenizer.json there, or prepare the dataset again"
    if not path.is_file():
        raise ConfigError("data.path", str(folder), f"has no {TOKENIZER_FILE}", fix)
    tokenizer = read_tokenizer_json(path, meta.eos_token)
    if tokenizer.fingerprint != meta.tokenizer_fingerprint:
        rule = f"{TOKENIZER_FILE} is not the tokenizer that {META_FILE} records"
        raise ConfigError("data.path", str(folder), rule, fix)
    return tokenizer


@contextmanager
def one_thread_per_call() -> Iterator[None]:
    """Prevent `tokenizers` from starting its own threads."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
