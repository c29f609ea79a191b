"""The table of runs in a terminal."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import is_address
from jaxpar.runtime import tables
from jaxpar.runtime.stages import stage
from jaxpar.stores.reading import for_reading, runs_at
from jaxpar.tools.report import listing
from jaxpar.tools.report.runs import RunRead, read_run


def found_runs(folders: Sequence[str]) -> list[RunRead]:
    """Read the runs in the folders. One that cannot be read is named on a line, and left out.

    Raises:   ConfigError if a folder does not exist, or there is no run in any.
    """
    places: dict[str, None] = {}
    for name in folders:
        if is_address(name):
            places |= dict.fromkeys(runs_at("FOLDER", name, listing.DEPTH))
            continue
        if not Path(name).is_dir():
            fix = "give a folder with runs, such as runs"
            raise ConfigError("FOLDER", name, "is not a folder", fix)
        places |= dict.fromkeys(map(str, listing.find_runs(Path(name), _leave_out)))
    runs = []
    for place in places:
        try:
            with stage(f"reading {place}"):
                runs.append(_read(place))
        except ConfigError as error:
            print(f"left out   {error}", file=sys.stderr)
    if not runs:
        rule = f"has no run in it, up to {listing.DEPTH} folders deep"
        raise ConfigError(
            "FOLDER", " ".join(folders), rule, "train one: python -m jaxpar.train quickstart"
        )
    return runs


def _leave_out(folder: Path, error: OSError) -> None:
    print(f"left out   {folder} cannot be read: {error.strerror}", file=sys.stderr)


def _read(place: str) -> RunRead:
    """Read a run in a folder, or a copy of one at an address, without its checkpoints."""
    if not is_address(place):
        return read_run(place)
    folder = for_reading("FOLDER", place, lambda line: None, checkpoints=False)
    return replace(read_run(str(folder)), name=place)


def lines(shown: Sequence[listing.Summary]) -> list[str]:
    """Return the table, with a second line per run for what differs: it is often long."""
    names, rows = listing.used_columns(shown)
    differs = [row.pop() if names[-1] == "differs" else "" for row in rows]
    names = [name for name in names if name != "differs"]
    head, *of_runs = tables.lines([names, *rows])
    made = [head]
    for row, more in zip(of_runs, differs, strict=True):
        made += [row, *([f"    {more}"] if more else [])]
    groups = listing.together(shown)
    if len(groups) > 1:
        made += ["", "These do not compare: they have other tokens or another objective."]
        made += [listing.heading(by, ranked) for by, ranked in groups.items()]
    return made
