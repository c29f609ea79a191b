"""Train a model:  python -m jaxpar.train CONFIG [--section.field value ...]
Resume a run:   python -m jaxpar.train RUN_DIR [--section.field value ...]

A run is saved in its folder, `run.dir`. If the folder has a checkpoint, the run resumes from it.
docs/checkpoints.md lists the fields that may change on a resume. `quickstart` first prepares a
text, the source code of the Python standard library, and ends with a sample of the model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxpar import commands
from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.options import Written
from jaxpar.config.rules.paths import is_address


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a model."""

    config: ConfigArguments
    certify: bool = False
    """Certify the config before the first step."""
    certificate: Annotated[str, Written("FILE")] = ""
    """Certificate to read. Default: that of the run."""

    def __post_init__(self) -> None:
        if self.certify and self.certificate:
            rule, fix = "is made by --certify", "use one of both"
            raise ConfigError("--certificate", self.certificate, rule, fix)


OPTIONS = TrainOptions


def main(options: TrainOptions) -> int:
    """Train to the end of the run."""
    from jaxpar.runtime.stages import stage

    with stage("importing JAX", live_only=True):
        from jaxpar.runtime import exit_codes
        from jaxpar.runtime.processes import peers, rendezvous
        from jaxpar.training import first_run
        from jaxpar.training.callbacks import own
        from jaxpar.training.start import run_to_end

    arguments = options.config
    if is_address(arguments.name):
        from jaxpar.stores.reading import with_local_config

        arguments = with_local_config(arguments)
    asked = arguments.checked(commands.model_from, commands.with_vocabulary)
    own.check(asked)
    if options.certify:
        from jaxpar.training.certified import certify_first

        certify_first(arguments, asked)
    cfg, environment = rendezvous.join(asked)
    is_first = first_run.prepare_quickstart(cfg) and arguments.name == "quickstart"
    code = run_to_end(cfg, environment, options.certificate)
    has_checkpoint = code == exit_codes.EXIT_OK and cfg.checkpoint.every > 0
    if is_first and has_checkpoint and peers.world_size() == 1:
        show_first_run(cfg)
    return code


def show_first_run(cfg: Config) -> None:
    """Print a sample of the model, and where everything is."""
    from jaxpar.inference.options import SampleOptions, Sampling
    from jaxpar.inference.sample import sample
    from jaxpar.training import first_run

    print("\nA sample:", flush=True)
    # Leaving out what is unlikely makes the text of a small model easier to read.
    how = Sampling(top_p=0.95)
    prompt = ("def __init__(self, ",)
    sample(SampleOptions(run=cfg.run.dir, prompt=prompt, max_tokens=240, save=True, sampling=how))
    first_run.report(Path(cfg.run.dir), Path(cfg.data.path))


if __name__ == "__main__":
    commands.run(__name__)
