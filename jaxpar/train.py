"""Train a model: python -m jaxpar.train CONFIG [--section.field value ...]

The run folder is all there is to a run. If it holds a checkpoint, the run goes on from there.
"""

from collections.abc import Sequence

from jaxpar.config.command_line import read_config
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.program import run_program
from jaxpar.training.start import run_to_end


def main(argv: Sequence[str]) -> int:
    """The command line."""
    cfg = read_config(argv, "jaxpar.train", __doc__)
    return run_to_end(*rendezvous.join(cfg))


if __name__ == "__main__":
    run_program(main)
