"""Inspect a run's checkpoints: python -m jaxpar.checkpoint ls RUN, verify RUN

Or start another run from one of them: branch RUN NEW. Or average several: average RUN NEW. Or
repeat a step of the run: replay RUN --step N.
"""

import shlex
from dataclasses import dataclass
from typing import Annotated

from jaxpar import commands
from jaxpar.certification.options import ReplayOptions
from jaxpar.config.command_line import as_called
from jaxpar.config.options import OR_ADDRESS, Argument, Range
from jaxpar.config.rules.limits import STEP
from jaxpar.config.rules.paths import is_address
from jaxpar.config.schema.optimizer import Weights
from jaxpar.runtime import exit_codes


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List the checkpoints of a run: step, date, bytes, mesh, and the result of checking files."""

    run: Annotated[str, Argument("RUN"), OR_ADDRESS]
    """Run folder, or the address of a run."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Verify all files and arrays of a run's checkpoints. Exit code 1 on any damage, 74 if one
    cannot be read."""

    run: Annotated[str, Argument("RUN"), OR_ADDRESS]
    """Run folder, or the address of a run."""
    step: Annotated[int | None, STEP] = None
    """Checkpoint to verify. None: all."""


@dataclass(frozen=True, kw_only=True)
class BranchOff:
    """Copy a checkpoint to a new run, which continues from it with its own config."""

    run: Annotated[str, Argument("RUN")]
    """Run folder."""
    new: Annotated[str, Argument("NEW")]
    """Folder of the new run, which must be empty or not exist."""
    step: Annotated[int | None, STEP] = None
    """Checkpoint to start from. None: the latest intact one."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Average the weights of several checkpoints of a run into a new folder, which any program can
    read."""

    run: Annotated[str, Argument("RUN")]
    """Run folder."""
    new: Annotated[str, Argument("NEW")]
    """Folder to write, which must be empty or not exist."""
    last: Annotated[int | None, Range(2, 10_000, 5)] = None
    """Average the last N checkpoints."""
    steps: tuple[int, ...] = ()
    """Average these checkpoints. Empty: the latest intact one, for its moving average."""
    weights: Weights = "trained"
    """Weights to average: those that are trained, or their moving averages."""


OPTIONS = {
    "ls": Ls,
    "verify": Verify,
    "branch": BranchOff,
    "average": Average,
    "replay": ReplayOptions,
}


def main(options: Ls | Verify | BranchOff | Average | ReplayOptions) -> int:
    """Run a subcommand. Returns the exit code."""
    import jax

    from jaxpar.checkpoint import inspection
    from jaxpar.checkpoint.averaging import average
    from jaxpar.checkpoint.branching import branch

    if isinstance(options, ReplayOptions):
        from jaxpar.certification.replay import replay

        replay(options)
        return exit_codes.EXIT_OK
    # The others only read and write files: they need no GPU.
    jax.config.update("jax_platforms", "cpu")
    match options:
        case Ls(run=run):
            rows = inspection.rows_in_store(run) if is_address(run) else inspection.rows(run)
            for number, row in enumerate(rows):
                if number == 0:
                    print(inspection.HEAD)
                print(row, flush=True)
        case Verify(run=run, step=step):
            verify = inspection.verify_in_store if is_address(run) else inspection.verify
            if not verify(run, step, log):
                return exit_codes.EXIT_ERROR
        case BranchOff(run=run, new=new, step=step):
            at = branch(run, new, step, log)
            more = f"--run.dir {shlex.quote(new)} --train.num-steps {2 * at}"
            train = f"python -m jaxpar.train {shlex.quote(run)} {more}"
            log(f"continue   {as_called(train)}")
        case Average(run=run, new=new, last=last, steps=steps, weights=weights):
            average(run, new, log, steps=steps, last=last, weights=weights)
            log(f"use        python -m jaxpar.sample {new}, or --run.init-from {new}")
    return exit_codes.EXIT_OK


def log(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    commands.run(__name__)
