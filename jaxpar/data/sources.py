"""Open the datasets in `data.path`, `data.mixture` and `data.held_out`, in any format."""

import errno
import hashlib
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpar.config import Config, ConfigError, Source
from jaxpar.config.lists.datasets import sources_of
from jaxpar.config.rules.paths import is_address
from jaxpar.config.values import to_values
from jaxpar.data.formats.arrays import DocumentOffsets, Joined
from jaxpar.data.formats.meta import META_FILE, PREPARE, SPLITS, TRAIN, read_meta, tokens_file
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.runtime import exit_codes
from jaxpar.runtime.units import size

if TYPE_CHECKING:
    from jaxpar.data.formats.token_file import TokenFile
    from jaxpar.data.tokenizer import Tokenizer

#: Permanent errors of reading a file. Others, such as a stale NFS handle, may be transient.
FOR_GOOD = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class Weighted(NamedTuple):
    """An opened source and its weight in the mixture."""

    dataset: TokenDataset
    weight: float


def open_sources(cfg: Config, split: str) -> list[Weighted]:
    """Open the sources of a split, in the config's order.

    Raises:   ConfigError that names field and path of an unusable source, or for document masking
              with files that do not mark documents; RunError for a transient read error.
    """
    named: tuple[str, tuple[Source, ...]]
    if split != TRAIN and cfg.data.held_out:
        named = "data.held_out", (Source(cfg.data.held_out, 1.0),)
    else:
        named = "data.mixture" if cfg.data.mixture else "data.path", sources_of(cfg)
    field, parts = named
    whole = field == "data.held_out"
    found = [Weighted(_open(cfg, field, part.path, split, whole), part.weight) for part in parts]
    value = getattr(cfg.data, field.removeprefix("data."))
    check_tokenizers(cfg, field, value, [part.path for part in parts])
    return found


def local(cfg: Config, field: str, path: str) -> str:
    """Return the path of a dataset on this host: for an address, that of its copy, which is made.

    Raises:   as `StoredFolder`.
    """
    if not is_address(path):
        return path
    from jaxpar.data.stored import local_copy

    return local_copy(cfg, field, path)


def check_tokenizers(cfg: Config, field: str, value: Any, paths: list[str]) -> None:
    """Check that datasets were made with the tokenizer of the training data.

    Args:     field, value: what names the datasets, for the error.
    Raises:   ConfigError if they record another one.
    """
    named = [source.path for source in sources_of(cfg)] + paths
    folders = {path: Path(local(cfg, field, path)) for path in named}
    metas = {path: read_meta(p) for path, p in folders.items() if (p / META_FILE).is_file()}
    known = {path: m.tokenizer_fingerprint for path, m in metas.items() if m.tokenizer_fingerprint}
    first = next(iter(known), "")
    other = next((path for path in known if known[path] != known[first]), None)
    if other is not None:
        rule = f"{other} was made with a different tokenizer than {first}"
        raise ConfigError(field, value, rule, "prepare both with the same --tokenizer")


def _open(cfg: Config, field: str, path: str, split: str, whole: bool) -> TokenDataset:
    place = local(cfg, field, path)
    try:
        workers = cfg.data.tokenize_workers
        dataset = open_tokens(place, split, cfg.data.eos_id, whole, workers=workers)
    except ConfigError as error:
        value = path if is_address(path) else error.value
        raise ConfigError(field, value, error.rule, error.fix) from error
    except OSError as error:
        what = f"{error.filename or path} cannot be read: {error.strerror or error}"
        if error.errno not in FOR_GOOD:
            raise exit_codes.RunError(f"{field}: {what}") from error
        fix = "check the file and its permissions"
        raise ConfigError(field, path, what, fix) from error
    if cfg.data.document_mask and not dataset.knows_documents:
        rule = f"{dataset.files[0]} does not mark the ends of documents"
        fix = "set its end-of-text token with --data.eos-id, or use --data.document-mask False"
        raise ConfigError("data.document_mask", True, rule, fix)
    return dataset


def check_made_by(tokenizer: "Tokenizer", named: str, dataset: TokenDataset) -> None:
    """Check that the option `--tokenizer` of a command can have made the tokens of a dataset.

    Raises:   ConfigError if the dataset has larger token ids.
    """
    if dataset.vocab_size > tokenizer.vocab_size:
        holds = f"{dataset.path} has a vocabulary of {dataset.vocab_size:,}"
        rule = f"has {tokenizer.vocab_size:,} tokens, but {holds}"
        raise ConfigError("--tokenizer", named, rule, "use the tokenizer of the dataset")


def open_tokens(
    path: str | Path,
    split: str = TRAIN,
    eos_id: int | None = None,
    whole: bool = False,
    again: bool = False,
    workers: int = 0,
) -> TokenDataset:
    """Open tokens in any format.

    Args:     path: a dataset folder; a Megatron pair by its prefix or one of its files; a .bin file
              of nanoGPT or llm.c; or a folder with such files train.bin and val.bin.
              eos_id: the token that ends documents in files that do not mark them.
              whole: use a single file as any split, and not only as the training split.
              again: read the complete file even if an earlier result is cached.
              workers: processes that tokenize the text of a streamed dataset. 0: this one.
    Raises:   ConfigError("data.path", ...) for tokens that are missing, damaged or unknown.
    """
    path = Path(path)
    if (path / META_FILE).is_file():
        return TokenDataset.open(path, split, workers)
    from jaxpar.data.formats.token_file import offsets_from, scan

    file = find_file(path, split, whole)
    found = scan(file, eos_id if file.document_offsets is None else None, again=again)
    offsets, marked = file.document_offsets, True
    if offsets is None:
        offsets, marked = offsets_from(found.eos_at, file.num_tokens), eos_id is not None
    identity = [file.dtype.str, found.sha256]
    if file.document_offsets is not None:
        identity.append(hashlib.sha256(np.ascontiguousarray(offsets)).hexdigest())
    return TokenDataset(
        path=path,
        split=split,
        vocab_size=found.largest + 1,
        fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        tokens=Joined([file.tokens()]),
        document_offsets=DocumentOffsets([offsets]),
        files=(file.path,),
        knows_documents=marked,
    )


def find_file(path: Path, split: str, whole: bool = False) -> "TokenFile":
    """Find another program's token file by its path, and check its header.

    Raises:   ConfigError("data.path", ...) as `open_tokens`.
    """
    from jaxpar.data.formats import megatron

    if path.is_dir():
        inside = path / f"{split}.bin"
        if inside.is_file():
            _check_others(path)
            return _read(inside)
        if (path / f"{TRAIN}.bin").is_file():
            raise _no_split(path, split)
        shards = list(path.glob("*.bin"))
        if shards:
            rule = f"has {len(shards)} .bin files, but no {split}.bin"
            raise ConfigError("data.path", str(path), rule, f"use one of them, or {_join(path)}")
    elif path.is_file() or megatron.index_of(path):
        if split != TRAIN and not whole:
            raise _no_split(path, split)
        return _read(path)
    read_meta(path)  # raises, with the command that would create the dataset
    raise AssertionError(f"{path} changed while it was looked at")


def _check_others(folder: Path) -> None:
    """Check that the splits of a folder are most of its tokens: other files are not read.

    Raises:   ConfigError("data.path", ...) otherwise.
    """
    splits = {tokens_file(split) for split in SPLITS}
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.bin"))}
    others = [name for name in sizes if name not in splits]
    num_bytes = sum(sizes[name] for name in others)
    if num_bytes > sum(sizes.values()) - num_bytes:
        rule = f"has {len(others)} other .bin files of {size(num_bytes)}, which are not read"
        raise ConfigError("data.path", str(folder), rule, f"move them, or {_join(folder)}")


def _join(folder: Path) -> str:
    """Return how to join the files of a folder."""
    files = f"{shlex.quote(str(folder))}/*.bin --output joined.bin --to llmc"
    return f"join all: python -m jaxpar.data convert --input {files}"


def _read(path: Path) -> "TokenFile":
    from jaxpar.data.formats import bin_file, megatron
    from jaxpar.data.prepare.documents import READERS

    index = megatron.index_of(path)
    if index:
        return megatron.read(index)
    if path.suffix == ".bin":
        return bin_file.read(path)
    if path.name.lower().endswith(tuple(READERS)):
        fix = f"prepare it: {PREPARE.replace('stdlib', str(path))} data/{path.stem}"
        raise ConfigError("data.path", str(path), "is text, not tokens", fix)
    if path.suffix == ".idx":
        rule, fix = "is not an index of tokens", "use Megatron's .idx file"
    else:
        rule, fix = "is not a token file", "use a .bin file or a folder"
    raise ConfigError("data.path", str(path), rule, fix)


def _no_split(path: Path, split: str) -> ConfigError:
    fix = "set held-out tokens with --data.held-out, or use --evaluation.every 0"
    return ConfigError("data.path", str(path), f"has no {split} split", fix)


def fingerprint(cfg: Config) -> str:
    """Return an identity of the training data and its weights, independent of its location.

    Raises:   ConfigError as `open_sources`.
    """
    field = "data.mixture" if cfg.data.mixture else "data.path"
    parts = [
        (_identity(cfg, field, source.path), float(source.weight)) for source in sources_of(cfg)
    ]
    if cfg.data.source is not None:
        known = json.dumps([parts, to_values(cfg.data.source)])
        return hashlib.sha256(known.encode()).hexdigest()
    if not cfg.data.mixture:
        return parts[0][0]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _identity(cfg: Config, field: str, path: str) -> str:
    folder = Path(local(cfg, field, path))
    if (folder / META_FILE).is_file():
        return read_meta(folder).fingerprint
    return _open(cfg, field, path, TRAIN, whole=False).fingerprint


def tokenizer_folder(cfg: Config) -> str:
    """Return the dataset folder with the tokenizer of the training data.

    Raises:   ConfigError for token files, which have no tokenizer.
    """
    path = local(cfg, "data.path", sources_of(cfg)[0].path)
    if Path(path).exists() and not (Path(path) / META_FILE).is_file():
        fix = "convert it to a folder: python -m jaxpar.data convert --tokenizer tokenizer.json"
        raise ConfigError("data.path", path, "has tokens without their tokenizer", fix)
    return path


def chat_template(cfg: Config) -> str:
    """Return the layout of the conversations that a run is trained on; empty if there are none.

    Raises:   ConfigError for a dataset folder that cannot be read.
    """
    for source in sources_of(cfg):
        folder = Path(local(cfg, "data.path", source.path))
        if (folder / META_FILE).is_file() and (name := read_meta(folder).template):
            return name
    return ""
