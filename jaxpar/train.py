"""Train a model:  python -m jaxpar.train CONFIG [--section.field value ...]
Resume a run:   python -m jaxpar.train RUN_DIR [--section.field value ...]

A run is saved in its folder, `run.dir`. If the folder has a checkpoint, the run resumes from it.
docs/checkpoints.md lists the fields that may change on a resume. `quickstart` first prepares a
text, the source code of the Python standard library, and ends with a sample of the model.
"""

from dataclasses import dataclass

from jaxpar import commands
from jaxpar.config.command_line import ConfigArguments


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a model."""

    config: ConfigArguments


OPTIONS = TrainOptions


def main(options: TrainOptions) -> int:
    """Train to the end of the run."""
    from jaxpar.execution.decisions import explain
    from jaxpar.runtime.processes import rendezvous
    from jaxpar.stores.fetching import with_local_config
    from jaxpar.training import first_run
    from jaxpar.training.start import run_to_end

    arguments = with_local_config(options.config)
    asked = arguments.checked(explain, commands.model_from, commands.with_vocabulary)
    cfg, environment = rendezvous.join(asked)
    first_run.prepare_quickstart(cfg)
    return run_to_end(cfg, environment)


if __name__ == "__main__":
    commands.run(__name__)
