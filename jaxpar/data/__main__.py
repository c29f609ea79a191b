"""Prepare datasets, convert and inspect them: `python -m jaxpar.data`."""

import sys
from collections.abc import Sequence

import tyro

from jaxpar.config import ConfigError, flag
from jaxpar.data.formats.convert import ConvertOptions, convert
from jaxpar.data.formats.inspect import InspectOptions, inspect_tokens
from jaxpar.data.formats.meta import PAIRS, Meta
from jaxpar.data.prepare.chat_command import ChatOptions, prepare_chat
from jaxpar.data.prepare.pairs_command import PairOptions, prepare_pairs
from jaxpar.data.prepare.progress import console_progress
from jaxpar.data.prepare.text import PrepareOptions, prepare
from jaxpar.data.stream.reframe import ReframeOptions, reframe
from jaxpar.runtime import exit_codes
from jaxpar.runtime.option_classes import read_subcommand
from jaxpar.runtime.program import run_program
from jaxpar.runtime.stages import stage

Options = (
    PrepareOptions | ChatOptions | PairOptions | ReframeOptions | ConvertOptions | InspectOptions
)

#: The exit code that shells report for a program ended by Ctrl-C.
EXIT_INTERRUPTED = 130


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


def main(args: Sequence[str]) -> int:
    """Run the command line.

    Returns:  the exit code; errors are one line on stderr.
    """
    try:
        options = read_command(args)
        done = _run(options)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return exit_codes.EXIT_CONFIG
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.EXIT_ERROR
    print(done)
    return 0


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
            line += f" {split.num_bytes / 1e6:>9,.1f} MB of text {ratio:>5.2f} bytes per token"
        lines.append(line)
    flags = flag("data.path", options.output)
    if meta.kind == PAIRS:
        flags += f" {flag('dpo.beta', 0.1)}"
    lines += [
        f"  loss of predicting only token frequencies: {meta.unigram_entropy:.3f}",
        f"train on it with: {flags} --model.vocab-size {-(-meta.vocab_size // 128) * 128}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main)
