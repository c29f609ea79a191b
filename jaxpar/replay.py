"""Repeat a step of a run: python -m jaxpar.replay RUN --step N

Starts from the checkpoint before the step, with the batches that RUN/recent.jsonl lists, and
repeats the step several times, also on other devices if there are any. The results are compared bit
by bit with the record and with each other, to find out whether data, hardware or numerics caused a
problem. No file is written.
"""

from collections.abc import Sequence

from jaxpar.runtime.option_classes import read_options
from jaxpar.runtime.program import run_program
from jaxpar.verification.replay import ReplayOptions, replay


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    replay(read_options(ReplayOptions, argv, "jaxpar.replay", __doc__))


if __name__ == "__main__":
    run_program(main)
