"""`python -m jaxpar.data teacher`."""

from dataclasses import dataclass

from jaxpar.config import Config
from jaxpar.config.command_line import ConfigArguments


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Keep what a teacher says of the training data, for a distillation without it.

    CONFIG and fields are those of the run: distill.teacher names the teacher, and distill.cache the
    folder to write. Training with the same fields then needs no teacher in memory. A command that
    was stopped continues.
    """

    config: ConfigArguments


def run(cfg: Config) -> None:
    """Keep what the teacher of a config says."""
    from jaxpar.features.distillation.teacher import keep

    keep(cfg)
