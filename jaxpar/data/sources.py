"""Open the datasets in `data.path`, `data.mixture` and `data.held_out`, in any format."""

import errno
import functools
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
from jaxpar.data.formats.identity import StreamHash
from jaxpar.data.formats.meta import META_FILE, PREPARE, TRAIN, read_meta
from jaxpar.data.formats.rows import RowTokens
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.runtime import exit_codes

if TYPE_CHECKING:
    from jaxpar.data.formats.token_file import Hints, TokenFile
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
        from jaxpar.data.formats.token_file import Hints

        hints, eos_id = Hints(cfg.data.token_dtype, cfg.model.vocab_size), cfg.data.eos_id
        workers = cfg.data.tokenize_workers
        dataset = open_tokens(place, split, eos_id, whole, False, workers, hints, trains=True)
    except ConfigError as error:
        value = path if is_address(path) else error.value
        fix, start = error.fix, cfg.run.init_from
        if start and PREPARE in fix and not (Path(start) / "checkpoints").is_dir():
            made = "python -m jaxpar.data prepare-chat --input CHATS.jsonl"
            fix = f"create it with `{made} --tokenizer {start} --output {path}`, or set data.path"
        raise ConfigError(field, value, error.rule, fix) from error
    except OSError as error:
        what = f"{error.filename or path} cannot be read: {error.strerror or error}"
        if error.errno not in FOR_GOOD:
            raise exit_codes.RunError(f"{field}: {what}") from error
        fix = "check the file and its permissions"
        raise ConfigError(field, path, what, fix) from error
    if any(isinstance(array, RowTokens) for array in dataset.tokens.arrays):
        _warn_of_rows(path)
    if cfg.data.document_mask and not dataset.knows_documents:
        rule = f"{dataset.files[0]} does not mark the ends of documents"
        fix = (
            "set the end-of-text token (GPT-2: --data.eos-id 50256), or --data.document-mask False"
        )
        raise ConfigError("data.document_mask", True, rule, fix)
    return dataset


@functools.cache
def _warn_of_rows(path: str) -> None:
    from jaxpar.runtime.processes.peers import log, rank

    if rank() == 0:
        log(f"data       {path} is decoded for each batch; faster: {converting(Path(path))}")


def converting(path: Path) -> str:
    """Return the command that copies token files into a folder."""
    files = f"{shlex.quote(str(path))} --output data/{path.stem}_tokens"
    return f"python -m jaxpar.data convert --input {files} --to jaxpar --eos-id N"


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
    hints: "Hints | None" = None,
    trains: bool = False,
) -> TokenDataset:
    """Open tokens in any format.

    Args:     path: a dataset folder, or files of other programs, as `others.find` takes them.
              eos_id: the token that ends documents in files that do not mark them.
              whole: use files without a split as any split, and not only as the training split.
              again: read complete files even if earlier results are cached.
              workers: processes that tokenize the text of a streamed dataset. 0: this one.
              hints: what is known of the dtype, for files that do not tell it.
              trains: refuse a format that must be converted.
    Raises:   ConfigError("data.path", ...) for tokens that are missing, damaged or unknown.
    """
    path = Path(path)
    if (path / META_FILE).is_file():
        return TokenDataset.open(path, split, workers)
    from jaxpar.data.formats.token_file import FEWEST_PIECES, PIECES, Hints, offsets_from, scan

    files = find_files(path, split, whole, hints or Hints(), trains)
    marked = all(file.document_offsets is not None for file in files)
    asked = None if marked and not any(file.rows for file in files) else eos_id
    pieces = max(PIECES // len(files), FEWEST_PIECES)
    found = [scan(file, asked, pieces, again=again) for file in files]
    if any(len(one.eos_at) for one in found):  # rows may be packed
        marked = False
    before = np.cumsum([0, *(file.num_tokens for file in files)]).tolist()
    if marked:
        offsets = [file.document_offsets for file in files if file.document_offsets is not None]
    else:  # a document may continue in the next file
        ends = [one.eos_at + start for one, start in zip(found, before, strict=False)]
        offsets = [offsets_from(np.concatenate(ends), before[-1])]
    text, lengths = StreamHash(), StreamHash()
    for one, file in zip(found, files, strict=True):
        text += StreamHash(int(one.identity, 16), file.num_tokens)
    for part in offsets if marked else ():
        lengths.update(np.diff(part))
    identity = [text.hex(), text.length, lengths.hex(), lengths.length]
    targets = [file.targets for file in files if file.targets is not None]
    return TokenDataset(
        path=path,
        split=split,
        vocab_size=max(one.largest for one in found) + 1,
        fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        tokens=Joined([file.tokens for file in files]),
        document_offsets=DocumentOffsets(offsets),
        files=tuple(file.path for file in files),
        targets=Joined(targets) if targets else None,
        knows_documents=marked or eos_id is not None,
    )


def find_files(
    path: Path, split: str, whole: bool, hints: "Hints", trains: bool
) -> list["TokenFile"]:
    """Find the token files of a split by their path, and check their headers.

    Raises:   ConfigError("data.path", ...) as `open_tokens`.
    """
    from jaxpar.data.formats import others

    found = others.find(path)
    if not found:
        raise _no_tokens(path)
    chosen = others.of_split(path, found, split)
    if (len(found) == 1 and not path.is_dir()) or (whole and not chosen):
        chosen = found if split == TRAIN or whole else []
    if not chosen:
        raise _no_split(path, split)
    one = chosen[0].format
    if titles := sorted({other.format.title for other in chosen} - {one.title}):
        rule = f"has tokens of several formats: {', '.join([one.title, *titles])}"
        some = chosen[0].path.parent / f"*{chosen[0].path.suffix}"
        fix = f"name the files of one, such as '{some}'"
        raise ConfigError("data.path", str(path), rule, fix)
    if trains and not one.trains:
        rule, fix = f"is {one.title}, which is slow to read", f"convert it: {converting(path)}"
        raise ConfigError("data.path", str(path), rule, fix)
    files = [file for this in chosen if (file := this.format.read(this.path, hints)) is not None]
    if not files:
        raise ConfigError("data.path", str(path), "has no tokens", "use files with tokens")
    if len({file.targets is None for file in files}) > 1:
        rule, fix = "has a loss mask for some files only", "copy the .loss files again"
        raise ConfigError("data.path", str(path), rule, fix)
    return files


def _no_tokens(path: Path) -> ConfigError:
    """Return the error for a path without token files."""
    from jaxpar.data.prepare.documents import READERS

    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else []
    if any(file.name.lower().endswith(tuple(READERS)) for file in files):
        fix = f"prepare it: {PREPARE.replace('stdlib', str(path))} data/{path.stem}"
        return ConfigError("data.path", str(path), "is text, not tokens", fix)
    if set(str(path)) & set("*?[,") and not path.exists():
        rule, fix = "matches no token files", "correct the pattern, or name a folder"
        return ConfigError("data.path", str(path), rule, fix)
    if path.is_file():
        rule, fix = "is not a token file", "use a file of the formats in docs/data.md, or a folder"
        return ConfigError("data.path", str(path), rule, fix)
    try:
        read_meta(path)
    except ConfigError as error:
        return error
    raise AssertionError(f"{path} changed while it was looked at")


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
    from jaxpar.data.formats import others

    path = local(cfg, "data.path", sources_of(cfg)[0].path)
    if not (Path(path) / META_FILE).is_file() and others.find(Path(path)):
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
