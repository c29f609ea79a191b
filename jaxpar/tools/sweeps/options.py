"""Options of `python -m jaxpar.sweep`."""

from dataclasses import dataclass
from typing import Annotated

from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.options import Written


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Train a config at every point of a grid, and rank the runs."""

    config: ConfigArguments
    grid: Annotated[
        tuple[str, ...], Written("FIELD=V,V", example="optimizer.learning_rate=1e-3,3e-3")
    ]
    """Values of a field. Every combination of several fields is a run."""
    folder: Annotated[str, Written("FOLDER")] = ""
    """Folder of the sweep. Empty: runs/sweep-CONFIG."""
    slurm: bool = False
    """Print a Slurm job array, and run nothing."""
