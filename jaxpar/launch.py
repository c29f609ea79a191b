"""A run's processes on this host, started and seen through: python -m jaxpar.launch -n N -- CONFIG

On GPUs, each process gets its share of CUDA_VISIBLE_DEVICES. Process 0 writes to the terminal, the
others to RUN/logs/rank-N.log. When one fails, the others are ended, and all start again from the
last checkpoint; unless the config is wrong (2), the numerics are bad (17), the same step has failed
twice with the same error, or --restarts were not enough for a new checkpoint. The exit code is the
run's. SIGTERM and Ctrl-C go to every process: the run saves, and ends with 75.
"""

from collections.abc import Sequence

from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.launcher import Launcher, read_command
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> int:
    """The command line."""
    launcher = Launcher(*read_command(argv, __doc__))
    children.on_signals(launcher.stop)
    return launcher.run()


if __name__ == "__main__":
    run_program(main)
