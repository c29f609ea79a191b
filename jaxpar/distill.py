"""Keep what a teacher says of the data: python -m jaxpar.distill CONFIG [--section.field value]

CONFIG and fields are those of the run: distill.teacher names the teacher, and distill.cache the
folder to write. Training with the same fields then needs no teacher in memory. A command that was
stopped continues.
"""

from collections.abc import Sequence

from jaxpar.config.command_line import read_config
from jaxpar.convert.shape import model_from
from jaxpar.execution.decisions import explain
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.program import run_program
from jaxpar.training.frozen.keeping import keep


def main(argv: Sequence[str]) -> None:
    """The command line."""
    cfg, _ = rendezvous.join(read_config(argv, "jaxpar.distill", __doc__, explain, model_from))
    keep(cfg)


if __name__ == "__main__":
    run_program(main)
