"""The work of `python -m jaxpar.data`."""

from jaxpar.config.command_line import as_called
from jaxpar.data.formats.convert import convert
from jaxpar.data.formats.inspect import inspect_tokens
from jaxpar.data.formats.meta import Meta
from jaxpar.data.options import (
    ConvertOptions,
    InspectOptions,
    Options,
    PrepareChatOptions,
    PrepareOptions,
    PreparePairsOptions,
    ReframeOptions,
)
from jaxpar.data.prepare.next_step import train_command
from jaxpar.data.prepare.progress import console_progress
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.data.prepare.text import prepare
from jaxpar.data.stream.reframe import reframe
from jaxpar.runtime.stages import stage
from jaxpar.runtime.units import size


def run(options: Options) -> str:
    """Run the command. Returns:  the text to print."""
    if isinstance(options, InspectOptions):
        with stage(f"reading {options.path}"):
            return inspect_tokens(options)
    with console_progress() as progress:
        if isinstance(options, ConvertOptions):
            return convert(options, progress)
        if isinstance(options, ReframeOptions):
            return reframe(options, progress)
        if isinstance(options, PrepareOptions):
            return _summary(options, prepare(options, progress))
        return _summary(options, prepare_records(options, progress))


def _summary(options: PrepareOptions | PrepareChatOptions | PreparePairsOptions, meta: Meta) -> str:
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
        f"train on it: {as_called(train_command(options.output, meta))}",
    ]
    return "\n".join(lines)
