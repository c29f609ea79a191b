"""Options of `python -m jaxpar.report`, and of its --list."""

from dataclasses import dataclass
from typing import Annotated

from jaxpar.config.options import OR_ADDRESS, Argument, Range


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of the report."""

    runs: Annotated[tuple[str, ...], Argument("RUN"), OR_ADDRESS]
    """Run folders."""
    output: str | None = None
    """File to write. None: report.html in the run's folder, or here for several runs."""
    watch: Annotated[int, Range(0, 86_400, 30)] = 0
    """Write the file again every N seconds, until the runs have ended; an open page reads it
    again by itself. 0: write it once."""


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List runs, the best one first.

    Shows the steps, loss, held-out loss, tokens, speed and time of every run in the folders, and
    the fields in which their configs differ. Runs may still be in progress.
    """

    folders: Annotated[tuple[str, ...], Argument("FOLDER"), OR_ADDRESS] = ("runs",)
    """Folders with runs, or of runs; or their addresses."""
    json: bool = False
    """Print a JSON list, with full precision, instead of a table."""
