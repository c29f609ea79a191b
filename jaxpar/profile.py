"""Show where a step's time and memory go: python -m jaxpar.profile RUN_OR_TRACE [--step N]

Reads the traces of a run (taken with `--profile.start N`, or by creating RUN/profile.request during
the run), or any JAX trace. With a second profile, compares the two. docs/profiling.md explains how
to take a trace, and each figure.
"""

from collections.abc import Sequence
from typing import Any

from jaxpar.profiling.command import (
    ProfileOptions,
    check,
    compared,
    figures,
    gpu_of,
    in_words,
    record,
    sent_by,
)
from jaxpar.profiling.hlo.memory import memory_of, of_sums
from jaxpar.profiling.loading import load
from jaxpar.runtime.files import json_output
from jaxpar.runtime.option_classes import read_options
from jaxpar.runtime.program import run_program
from jaxpar.runtime.stages import stage


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    options = read_options(ProfileOptions, argv, "jaxpar.profile", __doc__)
    check(options)
    if options.after:
        with stage(f"reading {options.path} and {options.after}"):
            found = compared(options)
        print(found.pop("text"))
        return _write(options, found)
    with stage(f"reading {options.path}"):
        loaded = load(options.path, options.step)
    gpu = gpu_of(options, loaded)
    found = figures(loaded, gpu, options.top)
    sent, memory = sent_by(loaded), memory_of(loaded.buffers, loaded.module)
    if memory is None and loaded.facts is not None:
        memory = of_sums(loaded.facts.memory)
    print(in_words(loaded, found, sent, memory, options.top))
    return _write(options, record(loaded, found, sent, memory))


def _write(options: ProfileOptions, figures: dict[str, Any]) -> None:
    if options.json:
        json_output.write("--json", options.json, figures)


if __name__ == "__main__":
    run_program(main)
