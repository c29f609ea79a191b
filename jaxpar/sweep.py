"""Train a config at every point of a grid, and rank the runs:

    python -m jaxpar.sweep CONFIG --grid optimizer.learning_rate=1e-3,3e-3,1e-2

Runs that differ in their schedule share a compiled program. Runs that have finished are skipped, so
the same command continues a sweep. It ends with the table of `python -m jaxpar.report --list`, and
a report.
"""

from jaxpar import commands
from jaxpar.tools.sweeps.options import SweepOptions

OPTIONS = SweepOptions


def main(options: SweepOptions) -> int:
    """Run the sweep, or print its job array, and return the exit code."""
    from jaxpar.tools.sweeps.command import read_sweep, sweep

    return sweep(read_sweep(options, commands.model_from, commands.with_vocabulary))


if __name__ == "__main__":
    commands.run(__name__)
