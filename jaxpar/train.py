"""Train a model:  python -m jaxpar.train CONFIG [--section.field value ...]
Resume a run:   python -m jaxpar.train RUN_DIR [--section.field value ...]

A run is saved in its folder, `run.dir`. If the folder has a checkpoint, the run resumes from it.
docs/checkpoints.md lists the fields that may change on a resume.
"""

from collections.abc import Sequence

from jaxpar.config.command_line import read_config
from jaxpar.convert.shape import model_from
from jaxpar.execution.decisions import explain
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.program import run_program
from jaxpar.stores.fetching import with_local_config
from jaxpar.training.first_run import prepare_quickstart
from jaxpar.training.start import run_to_end
from jaxpar.training.vocabulary import with_vocabulary


def main(argv: Sequence[str]) -> int:
    """The command line."""
    args = with_local_config(argv)
    cfg, environment = rendezvous.join(
        read_config(args, "jaxpar.train", __doc__, explain, model_from, with_vocabulary)
    )
    prepare_quickstart(cfg)
    return run_to_end(cfg, environment)


if __name__ == "__main__":
    run_program(main)
