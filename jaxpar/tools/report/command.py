"""The work of `python -m jaxpar.report`."""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.append import FULL
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.stages import stage
from jaxpar.runtime.terminal import warn
from jaxpar.stores.reading import with_local_runs
from jaxpar.tools.report import listing
from jaxpar.tools.report.listing import found_runs, lines
from jaxpar.tools.report.options import ListOptions, ReportOptions
from jaxpar.tools.report.page import page
from jaxpar.tools.report.runs import RunRead, is_run, read_run

#: Most runs whose lines can be distinguished.
MAX_RUNS = 21


def write_report(options: ReportOptions) -> None:
    """Write the report, and again with --watch, and print what was read and where it is."""
    output, runs = report(with_local_runs(options, print, checkpoints=False))
    for run in runs:
        remark = "" if run.series else ", no metrics yet"
        print(f"read       {run.name}: {run.last_step:,} steps{remark}")
    print(f"report     {output}, {output.stat().st_size / 1e3:,.0f} kB; open it in a browser")
    if options.watch and any(map(_in_progress, runs)):
        watch(options)


def list_runs(options: ListOptions) -> None:
    """Print the table of runs, or its JSON."""
    shown = listing.summaries(found_runs(options.folders))
    if options.json:
        print(json.dumps([dataclasses.asdict(summary) for summary in shown], indent=2))
    else:
        print("\n".join(lines(shown)))


def report(options: ReportOptions) -> tuple[Path, list[RunRead]]:
    """Read the runs and write the file atomically.

    Returns:  the path of the file, and the runs.
    Raises:   ConfigError if a folder is not a run's, or the file cannot be written.
    """
    names = list(dict.fromkeys(str(Path(name)) for name in options.runs))
    if not 1 <= len(names) <= MAX_RUNS:
        rule = f"must be 1 to {MAX_RUNS} folders, not {len(names)}"
        fix = "use python -m jaxpar.report runs/quickstart"
        raise ConfigError("RUN", " ".join(names), rule, fix)
    output = where(options.output, names)
    runs = []
    # A pattern such as runs/* may name a folder that is no run.
    others = [name for name in names if os.access(name, os.X_OK) and Path(name).is_dir()]
    others = [name for name in others if not is_run(name)]
    if len(others) < len(names):
        for name in others:
            warn(f"{name} is not a run's folder, and is left out")
        names = [name for name in names if name not in others]
    for name in names:
        with stage(f"reading {name}"):
            runs.append(read_run(name))
    going = options.watch if any(_in_progress(run) for run in runs) else 0
    _write(output, page(runs, datetime.now().astimezone(), live=going))
    return output, runs


def _in_progress(run: RunRead) -> bool:
    return not run.num_steps or run.last_step < run.num_steps


def pause(seconds: float) -> None:
    """Wait until the next look at the runs."""
    time.sleep(seconds)


def watch(options: ReportOptions) -> None:
    """Write the report again and again, until all runs have reached their last step, or Ctrl-C.

    The last page is one that does not read its file again.
    """
    print(f"watching   every {options.watch} s; Ctrl-C ends it", flush=True)
    try:
        while any(_in_progress(run) for run in report(options)[1]):
            pause(options.watch)
    except KeyboardInterrupt:
        report(dataclasses.replace(options, watch=0))


def where(output: str | None, names: Sequence[str]) -> Path:
    """Return the file to write.

    Raises:   ConfigError if it is not an HTML file in an existing folder.
    """
    if output is None:
        return Path(names[0], "report.html") if len(names) == 1 else Path("report.html")
    endings = (".html", ".htm")
    check_file("--output", output, "report.html", endings=endings, in_existing_folder=True)
    return Path(output)


def _write(path: Path, content: bytes) -> None:
    try:
        atomic.write(path, content)
    except OSError as error:
        if error.errno in FULL:
            raise
        fix = "use --output with a writable folder"
        raise ConfigError(
            "--output", str(path), f"cannot be written: {error.strerror}", fix
        ) from error
