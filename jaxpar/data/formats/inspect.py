"""Describe the tokens in a path, as the trainer reads them: `python -m jaxpar.data inspect`."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jaxpar.config import Config, ConfigError, flag
from jaxpar.config.command_line import as_called
from jaxpar.config.options import check_ranges
from jaxpar.data.formats import others
from jaxpar.data.formats.meta import (
    META_FILE,
    NO_TOKENIZER,
    SPLITS,
    STREAM_FILE,
    TRAIN,
    VAL,
    parts_file,
    read_meta,
    starts_file,
)
from jaxpar.data.formats.token_file import Hints, Sliced, chunks
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.options import InspectOptions
from jaxpar.data.sources import check_made_by, converting, local, open_tokens
from jaxpar.data.stream.tokens import StreamedTokens
from jaxpar.data.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from jaxpar.runtime.units import size

#: Tokens of the first document to show.
SHOWN_TOKENS = 64


def inspect_tokens(options: InspectOptions) -> str:
    """Describe the tokens in a path, as lines of text.

    Raises:   ConfigError for missing or damaged files.
    """
    check_ranges(options)
    given, options = options, replace(options, path=local(Config(), "PATH", options.path))
    datasets = list(_splits(options))
    tokenizer = _tokenizer(options)
    if tokenizer is not None:
        for dataset in datasets:
            check_made_by(tokenizer, options.tokenizer or given.path, dataset)
    lines = [f"{given.path}: {_format(options)}"]
    for dataset in datasets:
        several = len(datasets) > 1 or dataset.path.is_dir()
        label = f"{dataset.split}: " if several else ""
        documents = f"{dataset.num_documents:,}" if dataset.knows_documents else "unmarked"
        lines += [
            f"  {label}{dataset.num_tokens:,} tokens, {documents} documents",
            f"    {_stored(dataset)}, ids below {dataset.vocab_size:,}",
            f"    fingerprint {dataset.fingerprint[:16]}",
        ]
        if dataset.targets is not None:
            lines.append(
                f"    chat data: {dataset.targets[:].mean():.1%} of the tokens are targets"
            )
    first = datasets[0]
    ids = first.tokens[: min(int(first.document_offsets[1]), SHOWN_TOKENS)]
    if tokenizer is None:
        lines.append(f"  begins with tokens {' '.join(map(str, ids[:16].tolist()))}")
    else:
        lines.append(f"  begins with {tokenizer.decode(ids)!r}")
    if first.meta is None:
        lines.append(_next_command(given, datasets))
    return "\n".join(lines)


def _next_command(given: InspectOptions, datasets: Sequence[TokenDataset]) -> str:
    """Return what to do with token files of another program."""
    first, path = datasets[0], Path(given.path)
    if not others.find(path)[0].format.trains:
        return as_called(f"convert it: {converting(path)}")
    name = re.sub(r"\W+", "_", path.stem).strip("_")
    flags = [flag("run.dir", f"runs/{name}"), flag("data.path", given.path)]
    flags.append(flag("model.vocab_size", 0))
    flags += [flag("data.token_dtype", given.dtype)] if given.dtype else []
    if not first.knows_documents:
        flags.append("--data.eos-id N")
    elif given.eos_id is not None:
        flags.append(flag("data.eos_id", given.eos_id))
    if all(dataset.split != VAL for dataset in datasets):
        flags.append(flag("evaluation.every", 0))
    return as_called(f"train on it: python -m jaxpar.train quickstart {' '.join(flags)}")


def _splits(options: InspectOptions) -> Iterator[TokenDataset]:
    path = Path(options.path)
    for split in SPLITS:
        try:
            hints = Hints(options.dtype)
            dataset = open_tokens(path, split, options.eos_id, again=True, hints=hints)
        except ConfigError as error:
            if split == TRAIN or not error.rule.endswith(f"{split} split"):
                raise _for_commands(error) from error
            continue
        _check_hash(dataset)
        yield dataset


def _for_commands(error: ConfigError) -> ConfigError:
    fix = error.fix.replace("--data.", "--")
    return ConfigError(error.field, error.value, error.rule, fix)


def _check_hash(dataset: TokenDataset) -> None:
    """Raise ConfigError if tokens, targets or documents differ from the hashes in meta.json."""
    if dataset.meta is None:
        return  # has been read completely, and has no recorded hash
    tokens = dataset.tokens.arrays[0]
    if isinstance(tokens, StreamedTokens):
        for name, stored in (
            (parts_file(dataset.split), tokens.parts),
            (starts_file(dataset.split), tokens.starts),
        ):
            dataset.check_hash(name, _hash(stored), tokens.index.sha256.get(name, ""))
    for _ in dataset.checked_chunks():
        pass
    dataset.check_targets()
    dataset.check_offsets()


def _hash(stored: Sliced) -> str:
    """Return the hash of an array's bytes."""
    digest = hashlib.sha256()
    for _, chunk in chunks(stored):
        digest.update(chunk)
    return digest.hexdigest()


def _stored(dataset: TokenDataset) -> str:
    """Return how the tokens of a dataset are stored."""
    tokens = dataset.tokens.arrays[0]
    if not isinstance(tokens, StreamedTokens):
        count = len(dataset.files)
        return f"stored as {dataset.tokens.dtype.name}" + f" in {count:,} parts" * (count > 1)
    files = tokens.index.files
    num_bytes = sum(file.size for file in files)
    return f"tokenized from {len(files):,} files of {size(num_bytes)} when they are read"


def _format(options: InspectOptions) -> str:
    if (Path(options.path) / META_FILE).is_file():
        streamed = (Path(options.path) / STREAM_FILE).is_file()
        return f"a dataset of `python -m jaxpar.data prepare{' --stream' * streamed}`"
    found = others.find(Path(options.path))
    return found[0].format.title + f", {len(found):,} files" * (len(found) > 1)


def _tokenizer(options: InspectOptions) -> Tokenizer | None:
    if options.tokenizer is not None:
        return open_tokenizer(options.tokenizer, options.eos_id, "--eos-id")
    path = Path(options.path)
    if (path / META_FILE).is_file() and read_meta(path).tokenizer != NO_TOKENIZER:
        return load_tokenizer(path)
    return None
