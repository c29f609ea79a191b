"""Convert tokens between formats in bounded memory: `python -m jaxpar.data convert`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from msgspec import structs

from jaxpar.config import ConfigError
from jaxpar.config.options import check_ranges
from jaxpar.config.rules.paths import check_path, is_address
from jaxpar.data.formats import megatron
from jaxpar.data.formats.meta import (
    COUNTS_FILE,
    MAX_VOCAB_SIZE,
    META_FILE,
    NO_TOKENIZER,
    TRAIN,
    VAL,
    Meta,
    Part,
    part_folder,
)
from jaxpar.data.formats.others import FORMATS
from jaxpar.data.formats.token_file import Hints
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.formats.writer import SplitWriter, whole_folder, write_meta
from jaxpar.data.options import ConvertOptions
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.sources import check_made_by, open_tokens
from jaxpar.data.stored import send_part
from jaxpar.data.stream.tokens import StreamedTokens
from jaxpar.data.tokenizer import NoTokenizer, Tokenizer, load_tokenizer, open_tokenizer
from jaxpar.runtime.files import atomic

#: Tokens of a part of a dataset in a store.
PART_TOKENS = 1 << 30


def convert(options: ConvertOptions, progress: PreparationProgress | None = None) -> str:
    """Write the tokens of the inputs in another format.

    Returns:  a one-line summary.
    Raises:   ConfigError for an unusable input, or a format that cannot store it.
    """
    check_ranges(options)
    progress = progress or PreparationProgress()
    tokenizer = _tokenizer(options)
    inputs = _opened("--input", options.input, options.split, options, tokenizer)
    if options.to == "jaxpar":
        _write_folder(options, inputs, tokenizer, progress)
    elif options.to == "manifest":
        _write_manifest(options, inputs)
    elif options.held_out:
        rule, fix = f"needs --to jaxpar or manifest, not {options.to}", "convert it separately"
        raise ConfigError("--held-out", options.held_out[0], rule, fix)
    else:
        _write_files(options, inputs, _vocab_size(inputs, tokenizer), progress)
    num_tokens = sum(dataset.num_tokens for dataset in inputs)
    return f"{options.output}: {num_tokens:,} tokens ({options.to})"


def _tokenizer(options: ConvertOptions) -> Tokenizer | None:
    if options.tokenizer is None:
        return None
    tokenizer = open_tokenizer(options.tokenizer, options.eos_id, "--eos-id")
    if options.eos_id not in (None, tokenizer.eos_id):
        rule = f"is not the end of text of --tokenizer {options.tokenizer}, {tokenizer.eos_id}"
        raise ConfigError("--eos-id", options.eos_id, rule, "remove it")
    return tokenizer


def _opened(
    option: str,
    paths: Sequence[str],
    split: str,
    options: ConvertOptions,
    tokenizer: Tokenizer | None,
) -> list[TokenDataset]:
    if not paths:
        raise ConfigError("--input", "", "must name tokens to read", "use --input data/stdlib")
    eos_id = options.eos_id if tokenizer is None else tokenizer.eos_id
    marked = options.to in ("jaxpar", "megatron", "manifest")
    datasets = []
    for path in paths:
        try:
            hints = Hints(options.dtype, tokenizer.vocab_size if tokenizer else 0)
            whole = option == "--held-out" or (split != TRAIN and not Path(path).is_dir())
            dataset = open_tokens(path, split, eos_id, whole, hints=hints)
            dataset.check_offsets()
        except ConfigError as error:
            fix = error.fix.replace("--data.", "--")
            if error.rule.endswith(f"{split} split"):  # its fix is for a run
                fix = "use --split train" if option == "--input" else "use one that has tokens"
            raise ConfigError(option, error.value, error.rule, fix) from error
        if marked and not dataset.knows_documents:
            rule = f"is needed: {dataset.files[0]} does not mark the ends of documents"
            raise ConfigError("--eos-id", None, rule, "use --eos-id 50256 for GPT-2's tokens")
        if tokenizer is not None:
            check_made_by(tokenizer, options.tokenizer or "", dataset)
        if dataset.targets is not None and options.to != "manifest":
            rule = "is chat data, and convert does not keep its targets"
            raise ConfigError(option, str(path), rule, "use the folder as it is")
        datasets.append(dataset)
    return datasets


def _checked_chunks(dataset: TokenDataset) -> Iterator[np.ndarray]:
    """Yield all tokens in order.

    Raises:   ConfigError for a token outside the vocabulary, and at the end of a part that differs
              from the input's meta.json.
    """
    try:
        for start, chunk in dataset.checked_chunks():
            if (most := int(chunk.max())) >= dataset.vocab_size:
                place = dataset.place(start + int(np.argmax(chunk)))
                rule = f"{place} is {most}, outside the vocabulary of {dataset.vocab_size:,}"
                fix = "copy it again, or prepare it again"
                raise ConfigError("--input", str(dataset.path), rule, fix)
            yield chunk
    except ConfigError as error:
        raise ConfigError("--input", error.value, error.rule, error.fix) from error


def _vocab_size(inputs: Sequence[TokenDataset], tokenizer: Tokenizer | None) -> int:
    return tokenizer.vocab_size if tokenizer else max(dataset.vocab_size for dataset in inputs)


# ------------------------------------------------------------------------- a dataset folder


def _write_folder(
    options: ConvertOptions,
    inputs: Sequence[TokenDataset],
    tokenizer: Tokenizer | None,
    progress: PreparationProgress,
) -> None:
    eos_id = tokenizer.eos_id if tokenizer else options.eos_id
    if eos_id is None:
        rule = "is needed: the folder records which token ends a document"
        raise ConfigError("--eos-id", None, rule, "use --eos-id, or --tokenizer tokenizer.json")
    held_out: list[TokenDataset] = []
    if options.held_out:
        held_out = _opened("--held-out", options.held_out, VAL, options, tokenizer)
    vocab_size = max(_vocab_size([*inputs, *held_out], tokenizer), eos_id + 1)
    if vocab_size > MAX_VOCAB_SIZE:
        rule = f"has token ids up to {vocab_size - 1:,}, above the limit of {MAX_VOCAB_SIZE - 1:,}"
        fix = "check the dtype of the input, and --eos-id"
        raise ConfigError("--input", " ".join(options.input), rule, fix)
    with whole_folder(options.output, options.overwrite) as folder:
        known = tokenizer or NoTokenizer(vocab_size, eos_id)
        copies = _Copies(options, folder, known, progress)
        splits = {TRAIN: copies.copy(TRAIN, inputs), VAL: copies.copy(VAL, held_out)}
        named = (*options.input, *options.held_out)
        write_meta(folder, known, copies.counts[TRAIN], splits, inputs=named, holdout=0.0)


def _write_manifest(options: ConvertOptions, inputs: Sequence[TokenDataset]) -> None:
    """Write a folder whose parts are the files of prepared folders, which stay where they are."""
    check_path("--output", options.output, "use a folder of this computer")
    held_out: list[TokenDataset] = []
    if options.held_out:
        held_out = _opened("--held-out", options.held_out, VAL, options, None)
    metas = [_prepared(dataset) for dataset in (*inputs, *held_out)]
    same = ("vocab_size", "eos_id", "tokenizer_fingerprint", "kind", "template")
    for name in same:
        if len({getattr(meta, name) for meta in metas}) > 1:
            rule = f"have different values of {name} in their {META_FILE}"
            fix = "prepare them with the same options"
            raise ConfigError("--input", " ".join(options.input), rule, fix)
    first = metas[0]
    known: Tokenizer | NoTokenizer = NoTokenizer(first.vocab_size, first.eos_id)
    if first.tokenizer != NO_TOKENIZER:
        known = load_tokenizer(inputs[0].path)
    splits = {
        split: [
            structs.replace(part, name=str((dataset.path / part.name).resolve()))
            for dataset in datasets
            for part in dataset.parts
        ]
        for split, datasets in ((TRAIN, inputs), (VAL, held_out))
    }
    with whole_folder(options.output, options.overwrite) as folder:
        write_meta(
            folder,
            known,
            np.sum([_counts(dataset, first.vocab_size) for dataset in inputs], axis=0),
            splits,
            inputs=(*options.input, *options.held_out),
            holdout=0.0,
            kind=first.kind,
            template=first.template,
        )


def _prepared(dataset: TokenDataset) -> Meta:
    """Return the meta.json of files that a manifest can name. Raises: ConfigError."""
    meta = dataset.meta
    if meta is None or meta.of_version_1 or isinstance(dataset.tokens.arrays[0], StreamedTokens):
        rule, fix = "is no folder of tokens of this version", "use --to jaxpar, which copies"
        raise ConfigError("--input", str(dataset.path), rule, fix)
    return meta


def _counts(dataset: TokenDataset, vocab_size: int) -> np.ndarray:
    """Return how often each token is in a split: int64 [vocab_size]."""
    path = dataset.path / COUNTS_FILE
    if dataset.split == TRAIN and path.is_file():
        return np.load(path, allow_pickle=False)
    counts = np.zeros(vocab_size, np.int64)
    for chunk in _checked_chunks(dataset):
        counts += np.bincount(chunk, minlength=vocab_size)
    return counts


class _Copies:
    """Copies splits into a folder: each in one part; for an address in parts, which leave this host
    when they are complete."""

    def __init__(
        self,
        options: ConvertOptions,
        folder: Path,
        tokenizer: Tokenizer | NoTokenizer,
        progress: PreparationProgress,
    ):
        self._folder, self._tokenizer, self._progress = folder, tokenizer, progress
        self._options, self._in_parts, self._number = options, is_address(options.output), 0
        #: How often each token is in a split: int64 [vocab_size].
        self.counts: dict[str, np.ndarray] = {}

    def copy(self, split: str, datasets: Sequence[TokenDataset]) -> list[Part]:
        """Copy datasets. Returns:  the parts of the split, at least one."""
        self.counts[split] = np.zeros(self._tokenizer.vocab_size, np.int64)
        total, done, parts = sum(dataset.num_tokens for dataset in datasets), 0, list[Part]()
        knows_bytes = all(dataset.meta for dataset in datasets)  # of all, or of none
        most = PART_TOKENS if self._in_parts else 1 << 62
        writer = self._begin(split)
        for dataset in datasets:
            offsets, at, end, document = dataset.document_offsets, 0, 0, 0
            num_bytes = dataset.meta.splits[dataset.split].num_bytes if dataset.meta else 0
            for chunk in _checked_chunks(dataset):
                while len(chunk):
                    if at == end:  # copy documents until the part is full
                        if writer.num_tokens >= most:
                            parts.append(self._complete(writer, split))
                            writer = self._begin(split)
                        wanted = min(at + most - writer.num_tokens, dataset.num_tokens)
                        last = int(offsets.searchsorted(wanted))
                        ends = offsets[document + 1 : last + 1]
                        writer.end_documents(writer.num_tokens - at + ends)
                        document, end = last, int(offsets[last])
                        before, after = (num_bytes * n // dataset.num_tokens for n in (at, end))
                        writer.num_bytes += (after - before) * knows_bytes
                    some, chunk = chunk[: end - at], chunk[end - at :]
                    writer.copy(some)
                    at, done = at + len(some), done + len(some)
                    size = chunk.dtype.itemsize
                    self._progress.advance(done * size, total * size, done)
        return [*parts, self._complete(writer, split)]

    def _begin(self, split: str) -> SplitWriter:
        folder = self._folder / part_folder(self._number) if self._in_parts else self._folder
        folder.mkdir(exist_ok=True)
        return SplitWriter(folder, split, self._tokenizer.vocab_size, self._tokenizer.eos_id)

    def _complete(self, writer: SplitWriter, split: str) -> Part:
        part = writer.close()
        self.counts[split] += writer.token_counts
        if not self._in_parts:
            return part
        name, self._number = part_folder(self._number), self._number + 1
        send_part(self._folder / name, self._options.output, self._options.overwrite)
        return structs.replace(part, name=f"{name}/{split}")


# ---------------------------------------------------------------------------- other formats


def _write_files(
    options: ConvertOptions,
    inputs: Sequence[TokenDataset],
    vocab_size: int,
    progress: PreparationProgress,
) -> None:
    num_tokens = sum(dataset.num_tokens for dataset in inputs)
    check_path("--output", options.output, "use a file of this computer")
    output, index = Path(options.output), b""
    if output.name in ("", ".."):
        fix = f"use --output {output / 'tokens'}"
        raise ConfigError("--output", options.output, "is a folder, not a file", fix)
    header: tuple[bytes, np.dtype]
    if options.to == "megatron":
        header = b"", megatron.token_dtype(vocab_size)
        index = megatron.index_bytes(header[1], _offsets(inputs))
        files = [output.with_name(f"{output.name}.bin"), output.with_name(f"{output.name}.idx")]
    else:
        make = FORMATS[options.to].header
        assert make is not None
        header, files = make(vocab_size, num_tokens), [output]
    _check_outputs(files, inputs, options.overwrite)
    with _complete(files) as parts:
        if index:
            parts[1].write_bytes(index)
        with parts[0].open("wb") as file:
            file.write(header[0])
            for written, chunk in _all_chunks(inputs):
                file.write(chunk.astype(header[1]).tobytes())
                progress.advance(written, num_tokens, written)


def _all_chunks(inputs: Sequence[TokenDataset]) -> Iterator[tuple[int, np.ndarray]]:
    written = 0
    for dataset in inputs:
        for chunk in _checked_chunks(dataset):
            written += len(chunk)
            yield written, chunk


def _offsets(inputs: Sequence[TokenDataset]) -> np.ndarray:
    parts, before = [np.zeros(1, np.int64)], 0
    for dataset in inputs:
        parts.append(before + dataset.document_offsets[1:])
        before += dataset.num_tokens
    return np.concatenate(parts)


def _check_outputs(files: list[Path], inputs: Sequence[TokenDataset], overwrite: bool) -> None:
    read = {file.resolve() for dataset in inputs for file in dataset.files}
    for file in files:
        if file.resolve() in read:
            raise ConfigError("--output", str(file), "is an input", "use another file")
        if file.is_dir():
            raise ConfigError("--output", str(file), "is a folder", "use a file name")
        if file.exists() and not overwrite:
            fix = "add --overwrite to replace it, or use another file"
            raise ConfigError("--output", str(file), "exists", fix)


@contextmanager
def _complete(files: list[Path]) -> Iterator[list[Path]]:
    """Yield temporary files that are renamed together at the end, or deleted if the block fails."""
    parts = [atomic.temporary_name(file) for file in files]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    try:
        yield parts
        for part, file in zip(parts, files, strict=True):
            atomic.publish(part, file)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
