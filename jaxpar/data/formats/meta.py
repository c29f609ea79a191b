"""The description of a dataset folder, `meta.json`. `writer.py` writes it.

A split has parts, which are one after another in the order of the text. A part has these files,
whose names begin with that of the part: the split's, or FOLDER/SPLIT if there are several.
    NAME.bin             tokens, little-endian unsigned integers, no header (nanoGPT's layout)
    NAME.documents.npy   int64 [documents + 1]: start of each document, then the total
    NAME.targets.bin     for chat data: one byte per token, 1 if it is in the loss, otherwise 0
Once, there are `meta.json`, `tokenizer.json` unless the tokenizer is plain bytes, and `counts.npy`,
int64 [vocab_size]: how often each token is in the training split. `prepare/parts.py` leaves
`plan.json`, and in the folder of each part `counts.npy` and `part.json`.

A streamed dataset has no tokens. For NAME.bin, it has
    NAME.parts.bin       where the text of each part of a document is (`data/stream/index.py`)
    NAME.starts.bin      int64 [parts]: the first token of each part
and once: `stream.json`, which names the files of the text, and `frames.npy`.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta as Bounds
from msgspec import Struct

from jaxpar.config import ConfigError, declared
from jaxpar.config.declared import Count, Name
from jaxpar.config.json_reader import read_json_object
from jaxpar.data.formats.identity import StreamHash

FORMAT: Literal["jaxpar-tokens"] = "jaxpar-tokens"
VERSION = 2
TRAIN, VAL, TEST = SPLITS = ("train", "val", "test")

#: The kinds of tokenizers: plain bytes, and a tokenizer.json.
BYTES, JSON = "bytes", "json"

#: The kind of datasets whose documents are pairs of responses.
PAIRS = "pairs"

#: The tokenizer kind of tokens that were converted without a tokenizer.
NO_TOKENIZER = "none"

#: Limit on the size of a vocabulary. Arrays have this size, for example counts of each token.
MAX_VOCAB_SIZE = 1 << 24

META_FILE, COUNTS_FILE = "meta.json", "counts.npy"
PLAN_FILE, PART_FILE = "plan.json", "part.json"

#: In the folder of a part in a store: its other files.
SENT_FILE = "sent.json"
STREAM_FILE, FRAMES_FILE = "stream.json", "frames.npy"
TOKENIZER_FILE = "tokenizer.json"

#: Most bytes of a meta.json: about 100,000 parts of three splits.
MAX_META_BYTES = 256 << 20


def tokens_file(name: str) -> str:
    """Return the file name of a part's tokens. Args:     name: as in `Part`."""
    return f"{name}.bin"


def documents_file(name: str) -> str:
    """Return the file name of a part's document offsets."""
    return f"{name}.documents.npy"


def targets_file(name: str) -> str:
    """Return the file name of a part's targets."""
    return f"{name}.targets.bin"


def parts_file(name: str) -> str:
    """Return the file name of a streamed split's parts of documents."""
    return f"{name}.parts.bin"


def starts_file(name: str) -> str:
    """Return the file name of the first token of each part of a document."""
    return f"{name}.starts.bin"


def part_folder(number: int) -> str:
    """Return the folder of a part of a dataset of several."""
    return f"part-{number:05}"


_OF_PARTS = [
    name(split)
    for name in (tokens_file, documents_file, targets_file, parts_file, starts_file)
    for split in SPLITS
]

_ONCE = [META_FILE, TOKENIZER_FILE, COUNTS_FILE, STREAM_FILE, FRAMES_FILE, PLAN_FILE]


def is_dataset_file(name: str) -> bool:
    """Return whether a dataset folder can have a file. `--overwrite` deletes no others.

    Args:     name: relative to the folder.
    """
    folder, _, inner = name.rpartition("/")
    if folder:
        known = [*_OF_PARTS, COUNTS_FILE, PART_FILE, SENT_FILE]
        return re.fullmatch(r"part-\d{5}", folder) is not None and inner in known
    return name in _ONCE or name in _OF_PARTS


#: The command that makes a dataset, without the name of its folder.
PREPARE = "python -m jaxpar.data prepare --input stdlib --output"

type Sha256 = Annotated[str, Bounds(pattern="^[0-9a-f]{64}$")]
type PerhapsSha256 = Annotated[str, Bounds(pattern="^([0-9a-f]{64})?$")]
type PerhapsHash = Annotated[str, Bounds(pattern="^([0-9a-f]{16})?$")]
type Share = Annotated[float, Bounds(ge=0, lt=1)]


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Size and hashes of a part of a split."""

    name: Name
    """Its files without their endings: in the dataset's folder, or an absolute path."""
    num_tokens: Count
    """Number of tokens, including one end of text per document."""
    num_documents: Count
    """Number of documents."""
    num_bytes: Count
    """UTF-8 bytes of text, for bits per byte; 0 if unknown."""
    sha256: Sha256
    """Hash of the .bin file."""
    documents_sha256: Sha256
    """Hash of the document offsets, as int64."""
    targets_sha256: PerhapsSha256 = ""
    """Hash of the targets; empty if every token is a target."""
    tokens_hash: PerhapsHash = ""
    """`StreamHash` of the tokens. Empty in folders of version 1."""
    documents_hash: PerhapsHash = ""
    """The same of the lengths of the documents."""
    targets_hash: PerhapsHash = ""
    """The same of the targets."""
    most_documents: tuple[Count, ...] = ()
    """How many documents begin within 2^k tokens in a row, at most (`arrays.most_documents`). Empty
    in folders of version 1."""

    def __post_init__(self) -> None:
        if self.num_documents > self.num_tokens:
            raise ValueError(f"{self.num_documents} documents have {self.num_tokens} tokens")


class SplitMeta(Struct, frozen=True, kw_only=True):
    """Size and identity of one split: those of its parts in a row."""

    parts: tuple[Part, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including one end of text per document."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return sum(part.num_documents for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text; 0 if unknown for a part."""
        found = [part.num_bytes for part in self.parts if part.num_tokens]
        return sum(found) if all(found) else 0

    @property
    def has_targets(self) -> bool:
        """Whether some tokens are not in the loss."""
        return any(part.targets_sha256 for part in self.parts)

    @property
    def identity(self) -> list[Any]:
        """Sizes and hashes, which do not depend on where parts end."""
        tokens, documents, targets = StreamHash(), StreamHash(), StreamHash()
        for part in self.parts:
            tokens += StreamHash(int(part.tokens_hash, 16), part.num_tokens)
            documents += StreamHash(int(part.documents_hash, 16), part.num_documents)
            targets += StreamHash(int(part.targets_hash or "0", 16), part.num_tokens)
        marks = targets.hex() if self.has_targets else ""
        return [self.num_tokens, self.num_documents, tokens.hex(), documents.hex(), marks]


class Meta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Contents of a dataset folder."""

    VERSION: ClassVar[int] = VERSION

    format: Literal["jaxpar-tokens"]
    """Distinguishes this file from other meta.json files."""
    dtype: Annotated[str, Bounds(pattern="^uint(16|32)$")]
    """NumPy name of the stored integers; always little-endian."""
    vocab_size: Annotated[int, Bounds(ge=1, le=MAX_VOCAB_SIZE)]
    """One more than the largest token id."""
    eos_id: Count
    """Token that ends every document."""
    eos_token: str
    """Its text."""
    tokenizer: Annotated[str, Bounds(pattern=f"^({BYTES}|{JSON}|{NO_TOKENIZER})$")]
    """Kind of tokenizer: "bytes", "json" for the folder's tokenizer.json, or "none"."""
    tokenizer_fingerprint: PerhapsSha256
    """sha256 of the tokenizer."""
    unigram_entropy: Annotated[float, Bounds(ge=0)]
    """Entropy of the training tokens' frequencies, in nats: the loss of predicting only those."""
    inputs: tuple[str, ...]
    """The inputs, as given to the command."""
    holdout: Share
    """Share of held-out documents, as given to the command."""
    splits: dict[str, SplitMeta]
    """The folder's splits by name."""
    test: Share = 0.0
    """Share of documents in the test split."""
    kind: Literal["", "pairs"] = ""
    """PAIRS if documents alternate between the chosen and the rejected response of a pair."""
    template: Literal["", "plain", "chatml", "llama3"] = ""
    """Layout of conversations, the option --template of the command."""
    bad_rows: Count = 0
    """Rows of the inputs that were left out (--on-bad-row skip)."""
    first_bad_row: str = ""
    """File, line and reason of the first one."""
    of_version_1: str = ""
    """The fingerprint of a folder of version 1."""

    def __post_init__(self) -> None:
        most = math.log(self.vocab_size) + 1e-3
        wrong = {
            "vocab_size": self.dtype == "uint16" and token_dtype(self.vocab_size).name != "uint16",
            "eos_id": self.eos_id >= self.vocab_size,
            "tokenizer_fingerprint": (self.tokenizer_fingerprint == "")
            != (self.tokenizer == NO_TOKENIZER),
            "unigram_entropy": self.unigram_entropy > most,
            "splits": not {TRAIN, VAL} <= set(self.splits) <= set(SPLITS),
            "test": self.test > 0 and TEST not in self.splits,
        }
        for name in wrong:
            if wrong[name]:
                raise ValueError(f"{name} {getattr(self, name)!r}")
        for name, part in self.parts():
            hashed = bool(part.tokens_hash and part.documents_hash)
            marked = bool(part.targets_hash) == bool(part.targets_sha256)
            if not (self.of_version_1 or (hashed and marked)):
                raise ValueError(f"a part of {name} without the hashes of its streams")

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Yield all parts, each with its split."""
        for name, split in self.splits.items():
            yield from ((name, part) for part in split.parts)

    @property
    def fingerprint(self) -> str:
        """Identity of tokens, documents, targets and tokenizer, wherever the parts end."""
        if self.of_version_1:
            return self.of_version_1
        names = sorted(self.splits)
        known = [self.vocab_size, self.eos_id, self.tokenizer, self.tokenizer_fingerprint]
        counted = [*known, self.kind, [(name, self.splits[name].identity) for name in names]]
        return hashlib.sha256(json.dumps(counted).encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest little-endian dtype for the token ids."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def meta_to_json(meta: Meta) -> str:
    """Return the text of meta.json."""
    return declared.to_json(meta, indent=2) + "\n"


def read_meta(folder: str | Path) -> Meta:
    """Read the description of a dataset folder.

    Raises:   ConfigError("data.path", ...) if it is missing, or not a dataset of this version.
    """
    path = Path(folder) / META_FILE
    if not path.is_file():
        rule = "is not a dataset folder" if Path(folder).exists() else "does not exist"
        fix = f"create it with `{PREPARE} {folder}`, or set data.path to another dataset"
        if Path(f"{folder}.partial").is_dir():
            rule = f"is not complete: its parts are in {folder}.partial"
            fix = "run the command that prepares it again, or its missing tasks"
        raise ConfigError("data.path", str(folder), f"{rule} (no {META_FILE})", fix)
    try:
        values = read_json_object(path, what="it", max_bytes=MAX_META_BYTES)
        if values.get("version", 1) == 1:
            values = _of_version_1(values)
        return declared.convert(Meta, values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        rule = f"{path} is not the {META_FILE} of a version {VERSION} dataset ({error})"
        fix = f"prepare it again with `{PREPARE} {folder} --overwrite`"
        raise ConfigError("data.path", str(folder), rule, fix) from error


def _of_version_1(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a folder of version 1, which has one part, as those of this version."""
    named = {key: value for key, value in values.items() if key != "template"}
    text = json.dumps(named, indent=2) + "\n"
    splits = {name: {"parts": [{"name": name, **of}]} for name, of in values["splits"].items()}
    identity = {"version": VERSION, "of_version_1": hashlib.sha256(text.encode()).hexdigest()}
    return {**values, "splits": splits, **identity}
