"""Prepare datasets, convert and inspect them: `python -m jaxpar.data`."""

from collections.abc import Sequence

import tyro

from jaxpar.config.command_line import as_called
from jaxpar.data.formats.convert import ConvertOptions, convert
from jaxpar.data.formats.inspect import InspectOptions, inspect_tokens
from jaxpar.data.formats.meta import Meta
from jaxpar.data.prepare.chat_command import ChatOptions, prepare_chat
from jaxpar.data.prepare.next_step import train_command
from jaxpar.data.prepare.pairs_command import PairOptions, prepare_pairs
from jaxpar.data.prepare.progress import console_progress
from jaxpar.data.prepare.text import PrepareOptions, prepare
from jaxpar.data.stream.reframe import ReframeOptions, reframe
from jaxpar.runtime.option_classes import read_subcommand
from jaxpar.runtime.program import run_program
from jaxpar.runtime.stages import stage
from jaxpar.runtime.units import size

Options = (
    PrepareOptions | ChatOptions | PairOptions | ReframeOptions | ConvertOptions | InspectOptions
)


def read_command(args: Sequence[str]) -> Options:
    """Parse a command line. `--help` ends the program.

    Raises:   ConfigError for an invalid option.
    """
    return read_subcommand(
        {
            "prepare": PrepareOptions,
            "prepare-chat": ChatOptions,
            "prepare-pairs": PairOptions,
            "reframe": ReframeOptions,
            "convert": ConvertOptions,
            "inspect": InspectOptions,
        },
        args,
        "jaxpar.data",
        "Prepare, convert and inspect datasets of tokens, for `data.path`.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def main(args: Sequence[str]) -> None:
    """Run the command line."""
    print(_run(read_command(args)))


def _run(options: Options) -> str:
    """Run the command. Returns:  the text to print."""
    if isinstance(options, InspectOptions):
        with stage(f"reading {options.path}"):
            return inspect_tokens(options)
    with console_progress() as progress:
        if isinstance(options, ConvertOptions):
            return convert(options, progress)
        if isinstance(options, ReframeOptions):
            return reframe(options, progress)
        if isinstance(options, ChatOptions):
            return _summary(options, prepare_chat(options, progress))
        if isinstance(options, PairOptions):
            return _summary(options, prepare_pairs(options, progress))
        return _summary(options, prepare(options, progress))


def _summary(options: PrepareOptions | ChatOptions | PairOptions, meta: Meta) -> str:
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


if __name__ == "__main__":
    run_program(main)
