"""Train a config at every point of a grid, and rank the runs:

    python -m jaxpar.sweep CONFIG --grid optimizer.learning_rate=1e-3,3e-3,1e-2

Runs that differ in their schedule share a compiled program. Runs that have finished are skipped, so
the same command continues a sweep. It ends with the table of `python -m jaxpar.runs`, and a report.
"""

from collections.abc import Sequence

from jaxpar.convert.shape import model_from
from jaxpar.runtime.program import run_program
from jaxpar.sweeps.command import read_command, sweep
from jaxpar.training.vocabulary import with_vocabulary


def main(argv: Sequence[str]) -> int:
    """Run the command line."""
    return sweep(read_command(argv, __doc__, model_from, with_vocabulary))


if __name__ == "__main__":
    run_program(main)
