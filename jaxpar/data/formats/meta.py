"""The description of a dataset folder, `meta.json`. `writer.py` writes it.

A dataset folder has, for each split in `SPLITS`, of which it need not have the last:
    SPLIT.bin            tokens, little-endian unsigned integers, no header (nanoGPT's layout)
    SPLIT.documents.npy  int64 [documents + 1]: start of each document, then the total
    SPLIT.targets.bin    for chat data: one byte per token, 1 if it is in the loss, otherwise 0
and once: `meta.json`, and `tokenizer.json` unless the tokenizer is plain bytes.

A streamed dataset has no tokens. For SPLIT.bin, it has
    SPLIT.parts.bin      where the text of each part of a document is (`data/stream/index.py`)
    SPLIT.starts.bin     int64 [parts]: the first token of each part
and once: `stream.json`, which names the files of the text, and `frames.npy`.
"""

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import read_json_object

FORMAT = "jaxpar-tokens"
VERSION = 1
TRAIN, VAL, TEST = SPLITS = ("train", "val", "test")

#: The kinds of tokenizers: plain bytes, and a tokenizer.json.
BYTES, JSON = "bytes", "json"

#: The kind of datasets whose documents are pairs of responses.
PAIRS = "pairs"

#: The layouts of conversations (`prepare/chat.py`).
CHAT_TEMPLATES = ("plain", "chatml", "llama3")

#: The tokenizer kind of tokens that were converted without a tokenizer.
NO_TOKENIZER = "none"

#: Limit on the size of a vocabulary. Arrays have this size, for example counts of each token.
MAX_VOCAB_SIZE = 1 << 24

#: Dtypes of stored tokens.
DTYPES = ("uint16", "uint32")

META_FILE = "meta.json"
STREAM_FILE, FRAMES_FILE = "stream.json", "frames.npy"
TOKENIZER_FILE = "tokenizer.json"


def tokens_file(split: str) -> str:
    """Return the file name of a split's tokens."""
    return f"{split}.bin"


def documents_file(split: str) -> str:
    """Return the file name of a split's document offsets."""
    return f"{split}.documents.npy"


def targets_file(split: str) -> str:
    """Return the file name of a split's targets."""
    return f"{split}.targets.bin"


def parts_file(split: str) -> str:
    """Return the file name of a streamed split's parts of documents."""
    return f"{split}.parts.bin"


def starts_file(split: str) -> str:
    """Return the file name of the first token of each part."""
    return f"{split}.starts.bin"


#: All files that a dataset folder can have. `--overwrite` deletes only folders without other files.
DATASET_FILES = frozenset(
    [META_FILE, TOKENIZER_FILE, STREAM_FILE, FRAMES_FILE]
    + [tokens_file(split) for split in SPLITS]
    + [documents_file(split) for split in SPLITS]
    + [targets_file(split) for split in SPLITS]
    + [parts_file(split) for split in SPLITS]
    + [starts_file(split) for split in SPLITS]
)

#: The command that makes a dataset, without the name of its folder.
PREPARE = "python -m jaxpar.data prepare --input stdlib --output"


@dataclass(frozen=True, kw_only=True)
class SplitMeta:
    """Size and identity of one split."""

    num_tokens: int
    """Number of tokens, including one end of text per document."""
    num_documents: int
    """Number of documents."""
    num_bytes: int
    """UTF-8 bytes of text, for bits per byte; 0 if unknown."""
    sha256: str
    """Hash of the .bin file."""
    documents_sha256: str
    """Hash of the document offsets, as int64."""
    targets_sha256: str = ""
    """Hash of the targets; empty, and not written, if every token is a target."""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """Contents of a dataset folder."""

    dtype: str
    """NumPy name of the stored integers, "uint16" or "uint32"; always little-endian."""
    vocab_size: int
    """One more than the largest token id."""
    eos_id: int
    """Token that ends every document."""
    eos_token: str
    """Its text."""
    tokenizer: str
    """Kind of tokenizer: "bytes", "json" for the folder's tokenizer.json, or "none"."""
    tokenizer_fingerprint: str
    """sha256 of the tokenizer."""
    unigram_entropy: float
    """Entropy of the training tokens' frequencies, in nats: the loss of predicting only those."""
    inputs: tuple[str, ...]
    """The inputs, as given to the command."""
    holdout: float
    """Share of held-out documents, as given to the command."""
    splits: dict[str, SplitMeta]
    """The folder's splits by name."""
    test: float = 0.0
    """Share of documents in the test split; not written if there is none."""
    kind: str = ""
    """PAIRS if documents alternate between the chosen and the rejected response of a pair; not
    written otherwise."""
    template: str = ""
    """Layout of conversations, the option --template of the command; not written for other text."""
    bad_rows: int = 0
    """Rows of the inputs that were left out (--on-bad-row skip); not written if there are none."""
    first_bad_row: str = ""
    """File, line and reason of the first one."""
    format: str = FORMAT
    """Distinguishes this file from other meta.json files."""
    version: int = VERSION
    """Increased when older readers would misread the folder."""

    @property
    def fingerprint(self) -> str:
        """sha256 of all fields but `template`, and thereby of tokens, documents and tokenizer."""
        counted = dataclasses.replace(self, template="")
        return hashlib.sha256(meta_to_json(counted).encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest little-endian dtype for the token ids."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def meta_to_json(meta: Meta) -> str:
    """Return the text of meta.json."""
    values = dataclasses.asdict(meta)
    for split in values["splits"].values():
        if not split["targets_sha256"]:
            del split["targets_sha256"]
    for name in ("test", "kind", "template", "bad_rows", "first_bad_row"):
        if not values[name]:
            del values[name]
    return json.dumps(values, indent=2) + "\n"


def read_meta(folder: str | Path) -> Meta:
    """Read the description of a dataset folder.

    Raises:   ConfigError("data.path", ...) if it is missing, or not a dataset of this version.
    """
    path = Path(folder) / META_FILE
    if not path.is_file():
        rule = "is not a dataset folder" if Path(folder).exists() else "does not exist"
        fix = f"create it with `{PREPARE} {folder}`, or set data.path to another dataset"
        raise ConfigError("data.path", str(folder), f"{rule} (no {META_FILE})", fix)
    try:
        return _parse(read_json_object(path, what="it"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        rule = f"{path} is not the {META_FILE} of a version {VERSION} dataset ({error})"
        fix = f"prepare it again with `{PREPARE} {folder} --overwrite`"
        raise ConfigError("data.path", str(folder), rule, fix) from error


def _parse(values: dict[str, Any]) -> Meta:
    if (values["format"], values["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {values['format']!r}, version {values['version']!r}")
    names = [name for name in SPLITS if name != TEST or name in values["splits"]]
    splits = {name: SplitMeta(**values["splits"][name]) for name in names}
    meta = Meta(**(values | {"splits": splits, "inputs": tuple(values["inputs"])}))
    _check_types(meta)
    for split in splits.values():
        _check_types(split)
    _check_values(meta)
    return meta


def _check_values(meta: Meta) -> None:
    """Raise ValueError for a value that `writer.py` and `convert.py` never write."""
    valid = {
        "dtype": meta.dtype in DTYPES,
        "vocab_size": 1 <= meta.vocab_size <= MAX_VOCAB_SIZE
        and not (meta.dtype == "uint16" and token_dtype(meta.vocab_size).name != "uint16"),
        "eos_id": 0 <= meta.eos_id < meta.vocab_size,
        "tokenizer": meta.tokenizer in (BYTES, JSON, NO_TOKENIZER),
        "tokenizer_fingerprint": meta.tokenizer == NO_TOKENIZER
        or _is_sha256(meta.tokenizer_fingerprint),
        "unigram_entropy": 0 <= meta.unigram_entropy <= math.log(max(meta.vocab_size, 1)) + 1e-3,
        "inputs": all(isinstance(name, str) for name in meta.inputs),
        "holdout": 0 <= meta.holdout < 1,
        "test": 0 <= meta.test < 1 and (meta.test == 0 or TEST in meta.splits),
        "kind": meta.kind in ("", PAIRS),
        "template": meta.template in ("", *CHAT_TEMPLATES),
        "bad_rows": meta.bad_rows >= 0,
    }
    parts: list[tuple[Meta | SplitMeta, dict[str, bool]]] = [(meta, valid)]
    for split in meta.splits.values():
        valid = {
            "num_tokens": split.num_tokens >= 0,
            "num_documents": 0 <= split.num_documents <= split.num_tokens,
            "num_bytes": split.num_bytes >= 0,
            "sha256": _is_sha256(split.sha256),
            "targets_sha256": split.targets_sha256 == "" or _is_sha256(split.targets_sha256),
            "documents_sha256": _is_sha256(split.documents_sha256),
        }
        parts.append((split, valid))
    for part, fine in parts:
        for name in fine:
            if not fine[name]:
                raise ValueError(f"{name} {getattr(part, name)!r}")


def _is_sha256(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def _check_types(part: Meta | SplitMeta) -> None:
    """Raise TypeError for a field whose value has the wrong type."""
    for name, hint in get_type_hints(type(part)).items():
        kind, value = get_origin(hint) or hint, getattr(part, name)
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{name} {value!r}")
