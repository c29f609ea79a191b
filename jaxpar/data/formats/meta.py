"""`meta.json`: what a dataset folder holds. Written by `writer.py`, read by everything else.

A dataset folder, for each split in `SPLITS`:
    SPLIT.bin            tokens, little-endian unsigned integers, no header (nanoGPT's layout)
    SPLIT.documents.npy  int64 [documents + 1]: where each document starts, then the total
    SPLIT.targets.bin    of chat data: a byte for each token, 1 where the loss is taken, 0 elsewhere
and once: `meta.json`, and `tokenizer.json` unless the tokenizer is plain bytes.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np

from jaxpar.config import ConfigError

FORMAT = "jaxpar-tokens"
VERSION = 1
TRAIN, VAL = SPLITS = ("train", "val")

#: The kind of tokenizer of tokens that were converted without one.
NO_TOKENIZER = "none"

#: How tokens may be stored.
DTYPES = ("uint16", "uint32")

META_FILE = "meta.json"
TOKENIZER_FILE = "tokenizer.json"


def tokens_file(split: str) -> str:
    """Name of a split's tokens."""
    return f"{split}.bin"


def documents_file(split: str) -> str:
    """Name of a split's document offsets."""
    return f"{split}.documents.npy"


def targets_file(split: str) -> str:
    """Name of a split's marks of targets."""
    return f"{split}.targets.bin"


#: Every file that a dataset folder can hold; `--overwrite` deletes a folder of nothing else.
DATASET_FILES = frozenset(
    [META_FILE, TOKENIZER_FILE]
    + [tokens_file(split) for split in SPLITS]
    + [documents_file(split) for split in SPLITS]
    + [targets_file(split) for split in SPLITS]
)

#: The command that makes a dataset, up to the name of its folder.
PREPARE = "python -m jaxpar.data prepare --input stdlib --output"


@dataclass(frozen=True, kw_only=True)
class SplitMeta:
    """Size and identity of one split."""

    num_tokens: int
    """Tokens, one end of text per document included."""
    num_documents: int
    """Documents."""
    num_bytes: int
    """UTF-8 bytes of text, for bits per byte; 0 if nobody knows."""
    sha256: str
    """Hash of the .bin file."""
    targets_sha256: str = ""
    """Hash of the marks of targets; empty, and not written, where every token is one."""
    documents_sha256: str = ""
    """Hash of the document offsets, as int64; empty, and not written, in older datasets."""


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
    """Entropy of the training tokens' frequencies, in nats: the loss of knowing only those."""
    inputs: tuple[str, ...]
    """What the dataset was prepared from, as given."""
    holdout: float
    """Share of documents held out, as asked for."""
    splits: dict[str, SplitMeta]
    """By name, one for each of SPLITS."""
    format: str = FORMAT
    """Tells this file from any other meta.json."""
    version: int = VERSION
    """Raised when an older reader would misread the folder."""

    @property
    def fingerprint(self) -> str:
        """sha256 over every field, hence over tokens, documents and tokenizer: what the data is."""
        return hashlib.sha256(meta_to_json(self).encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest stored integer that holds every token id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def meta_to_json(meta: Meta) -> str:
    """The text of meta.json."""
    values = dataclasses.asdict(meta)
    for split in values["splits"].values():
        for name in ("targets_sha256", "documents_sha256"):
            if not split[name]:
                del split[name]  # So that older datasets keep their fingerprints.
    return json.dumps(values, indent=2) + "\n"


def read_meta(folder: str | Path) -> Meta:
    """The description of a dataset folder.

    Raises:   ConfigError("data.path", ...) when it is missing, or no dataset of this version.
    """
    path = Path(folder) / META_FILE
    if not path.is_file():
        rule = "is not a dataset folder" if Path(folder).exists() else "does not exist"
        fix = f"write it with `{PREPARE} {folder}`, or point data.path at one"
        raise ConfigError("data.path", str(folder), f"{rule} (no {META_FILE})", fix)
    try:
        return _parse(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        rule = f"{path} is not the {META_FILE} of a version {VERSION} dataset ({error})"
        fix = f"prepare it again with `{PREPARE} {folder} --overwrite`"
        raise ConfigError("data.path", str(folder), rule, fix) from error


def _parse(values: dict[str, Any]) -> Meta:
    if (values["format"], values["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {values['format']!r}, version {values['version']!r}")
    splits = {name: SplitMeta(**values["splits"][name]) for name in SPLITS}
    meta = Meta(**(values | {"splits": splits, "inputs": tuple(values["inputs"])}))
    _check_types(meta)
    for split in splits.values():
        _check_types(split)
    if meta.dtype not in DTYPES:
        raise ValueError(f"dtype {meta.dtype!r}")
    return meta


def _check_types(part: Meta | SplitMeta) -> None:
    """Raises:   TypeError naming a field whose value is not of its type."""
    for name, hint in get_type_hints(type(part)).items():
        kind, value = get_origin(hint) or hint, getattr(part, name)
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{name} {value!r}")
