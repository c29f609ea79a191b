"""The work of `python -m jaxpar.data`."""

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.config import flag
from jaxpar.config.command_line import as_called
from jaxpar.config.fields import switches_for
from jaxpar.config.rules.paths import is_address
from jaxpar.data.formats.convert import convert
from jaxpar.data.formats.inspect import inspect_tokens
from jaxpar.data.formats.meta import PAIRS, VAL, Meta, documents_file
from jaxpar.data.options import (
    ConvertOptions,
    InspectOptions,
    Options,
    PrepareChatOptions,
    PrepareOptions,
    PreparePairsOptions,
    ReframeOptions,
)
from jaxpar.data.prepare.progress import console_progress
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.data.prepare.text import prepare
from jaxpar.data.stream.reframe import reframe
from jaxpar.runtime.hub import is_name
from jaxpar.runtime.stages import stage
from jaxpar.runtime.units import size

# ------------------------------------- The command that trains on a dataset, which `prepare` prints


#: Tokens of a sequence in `quickstart`.
SEQ_LEN = 256


def train_command(output: str, meta: Meta, model: str = "") -> str:
    """Return the command that trains a small model on a dataset that was written.

    Args:
        output: the dataset's folder or address, as given.
        model: fine-tune this published model instead.
    """
    name = output.rstrip("/").rpartition("/")[2]
    flags = [flag("run.dir", f"runs/{name}"), flag("data.path", output)]
    if model:
        flags += switches_for(PAIRS)[:1] if meta.kind == PAIRS else []
        return f"python -m jaxpar.train --from {shlex.quote(model)} {' '.join(flags)}"
    flags.append(flag("model.vocab_size", -(-meta.vocab_size // 128) * 128))
    seq_len = _seq_len(output, meta)
    if seq_len != SEQ_LEN:
        flags.append(flag("data.seq_len", seq_len))
    if meta.kind == PAIRS:
        flags.append(switches_for(PAIRS)[0])
    if not meta.splits[VAL].num_tokens:
        flags.append(flag("evaluation.every", 0))
    return f"python -m jaxpar.train quickstart {' '.join(flags)}"


def _seq_len(output: str, meta: Meta) -> int:
    """Return a length of sequences that each split has one of, and that holds each pair."""
    found = [split.num_tokens for split in meta.splits.values() if split.num_tokens]
    if meta.kind != PAIRS:
        shorter = (SEQ_LEN, 128, 64, 32, 16, 8, 4, 2)
        return next((n for n in shorter if n < min(found)), 1)  # the last label is one more
    if is_address(output):
        return SEQ_LEN  # the files are not on this host
    folder = Path(output).expanduser()
    lengths = [
        np.diff(np.load(folder / documents_file(part.name), allow_pickle=False))
        for _, part in meta.parts()
        if part.num_tokens
    ]
    longest = max(int(one.reshape(-1, 2).sum(axis=1).max()) for one in lengths)
    return max(SEQ_LEN, -(-longest // 64) * 64)


def run(options: Options) -> str:
    """Run the command. Returns:  the text to print."""
    if isinstance(options, InspectOptions):
        with stage(f"reading {options.path}"):
            return inspect_tokens(options)
    with _ended_by_sigterm(), console_progress() as progress:
        if isinstance(options, ConvertOptions):
            return convert(options, progress)
        if isinstance(options, ReframeOptions):
            return reframe(options, progress)
        if isinstance(options, PrepareOptions):
            return _summary(options, prepare(options, progress))
        return _summary(options, prepare_records(options, progress))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End the block by SIGTERM as by Ctrl-C, so that it deletes what it has begun."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _model_of(options: PrepareOptions | PrepareChatOptions | PreparePairsOptions) -> str:
    """Return the published model whose tokenizer conversations and pairs have: to fine-tune it."""
    if isinstance(options, PrepareOptions):
        return ""
    published = is_name(options.tokenizer) or (Path(options.tokenizer) / "config.json").is_file()
    return options.tokenizer if published else ""


def _summary(
    options: PrepareOptions | PrepareChatOptions | PreparePairsOptions, meta: Meta | None
) -> str:
    if meta is None:
        return f"part {options.part} is complete; the last task to finish makes {options.output}"
    lines = [f"{options.output}: {meta.vocab_size:,} tokens in the vocabulary ({meta.dtype})"]
    for name, split in meta.splits.items():
        line = f"  {name:5} {split.num_tokens:>13,} tokens {split.num_documents:>9,} documents"
        if split.num_bytes:
            ratio = split.num_bytes / split.num_tokens
            line += f" {size(split.num_bytes):>11} of text {ratio:>5.2f} bytes per token"
        lines.append(line)
    if meta.bad_rows:
        lines.append(f"  bad rows left out: {meta.bad_rows:,}; the first: {meta.first_bad_row}")
    lines += [
        f"  a document ends with {meta.eos_token}",
        f"  loss of predicting only token frequencies: {meta.unigram_entropy:.3f}",
        f"train on it: {as_called(train_command(options.output, meta, _model_of(options)))}",
    ]
    return "\n".join(lines)
