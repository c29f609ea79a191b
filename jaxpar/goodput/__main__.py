"""Predict a run's goodput under failures: python -m jaxpar.goodput --gpus N --step-seconds S

Simulates runs on many hosts: random failures of GPUs, hosts, networks and programs, saves to disk
and to the memory of other hosts, recoveries, spare hosts and repairs. Prints the share of the time
that goes into steps which count (goodput), with a 95% confidence interval over seeds, and where the
rest goes. --best searches the steps between saves.
docs/planning.md#goodput-under-failures explains the model.
"""

from collections.abc import Sequence

from jaxpar.goodput.command import answer, read_command
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    answer(read_command(argv, __doc__))
    return 0


if __name__ == "__main__":
    run_program(main)
