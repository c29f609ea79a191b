"""The work of `python -m jaxpar.sweep`, and what it prints."""

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.model_source import ModelReader
from jaxpar.config.printable import printable
from jaxpar.config.rules.paths import refuse_address
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import atomic
from jaxpar.tools.report import listing
from jaxpar.tools.report.command import MAX_RUNS as MAX_RUNS_OF_REPORT
from jaxpar.tools.report.listing import lines
from jaxpar.tools.report.page import page
from jaxpar.tools.report.runs import read_run
from jaxpar.tools.sweeps.grid import SweepPoint, points_of, shares_program
from jaxpar.tools.sweeps.options import SweepOptions
from jaxpar.tools.sweeps.running import Runner, SweepFolder

# ----------------------------------- Prints a sweep as a Slurm job array, with one run in each task


SCRIPT = """\
#!/bin/bash
# {count} runs of a sweep, each in a task of this array. Set what a run needs: nodes, GPUs, time.
# Afterwards, the command of the sweep without --slurm ranks the runs.
#SBATCH --job-name=jaxpar-sweep
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}

set -u
case "$SLURM_ARRAY_TASK_ID" in
{runs}
esac
srun --kill-on-bad-exit=1 {python} -u -m jaxpar.train {common} "${{flags[@]}}"
code=$?
# 75: preempted and saved. The run resumes.
if [ "$code" -eq 75 ]; then scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"; fi
exit "$code"
"""


def job_array(
    python: str, common: Sequence[str], runs: Sequence[Sequence[str]], folder: str
) -> str:
    """Return the script.

    Args:     common: the config, and the flags of all runs. runs: the flags of each run.
              folder: for the tasks' output.
    Raises:   ConfigError for a text that a line of the script cannot have.
    """
    texts = (python, *common, *itertools.chain.from_iterable(runs))
    for name, text in (("--folder", folder), *(("--slurm", text) for text in texts)):
        if printable(text) != text:
            rule = "has a control character, which a batch script cannot have"
            raise ConfigError(name, text, rule, "leave --slurm out, or rename it")
    if "\\" in folder:
        rule = "has a backslash, after which Slurm does not number the outputs of tasks"
        raise ConfigError("--folder", folder, rule, "use another --folder with --slurm")
    cases = (f"  {i}) flags=({shlex.join(flags)}) ;;" for i, flags in enumerate(runs))
    return SCRIPT.format(
        count=len(runs),
        last=len(runs) - 1,
        # Slurm reads quotes as a shell does, and then replaces %a.
        output=shlex.quote(f"{folder.replace('%', '%%')}/slurm-%a.out"),
        runs="\n".join(cases),
        python=shlex.quote(python),
        common=shlex.join(common),
    )


SHARED = "optimizer.schedule_as_input"


@dataclass(frozen=True)
class Sweep:
    """A sweep, read and checked."""

    name: str
    """The config's name, as given."""
    base: Config
    points: list[SweepPoint]
    folder: SweepFolder
    common: list[str]
    """The flags of all runs."""
    slurm: bool

    @property
    def axes(self) -> list[str]:
        """The fields of the grid."""
        return list(self.points[0].values)


def read_sweep(
    options: SweepOptions,
    model_from: ModelReader | None = None,
    fill: Callable[[Config], Config] | None = None,
) -> Sweep:
    """Read the config and the grid.

    Args:     model_from, fill: as in `ConfigArguments.checked`.
    Raises:   ConfigError for an option, a config or a grid that cannot work.
    """
    overrides = options.config.overrides
    base = options.config.checked(model_from=model_from, fill=fill)
    points = points_of(base, options.grid)
    for path in points[0].values:
        if _given(path, overrides):
            rule = "is in the grid, and given for all runs as well"
            raise ConfigError(path, "", rule, "use one of both")
    refuse_address("--folder", options.folder, "use --folder runs/sweep")
    name = options.config.name
    folder = options.folder or f"runs/sweep-{Path(name).stem}"
    common = [*overrides]
    if shares_program(list(points[0].values)) and not _given(SHARED, overrides):
        common.append(f"--{SHARED}=True")
        share = lambda p: dataclasses.replace(p, cfg=replace(p.cfg, **{SHARED: True}))  # noqa: E731
        points = list(map(share, points))
    return Sweep(name, base, points, SweepFolder(Path(folder)), common, options.slurm)


def _given(path: str, overrides: Sequence[str]) -> bool:
    """Whether a command line sets a field."""
    names = {text.removeprefix("--").partition("=")[0].replace("-", "_") for text in overrides}
    return path in names


def sweep(told: Sweep, log: Callable[[str], None] = print) -> int:
    """Run a sweep, or print its job array. Returns the exit code."""
    if told.slurm:
        runs = [[*p.flags, f"--run.dir={told.folder.run_dir(p)}"] for p in told.points]
        common = [told.name, *told.common]
        script = job_array(sys.executable, common, runs, str(told.folder.path))
        told.folder.open(told.base, told.axes)
        print(script, end="")
        return exit_codes.EXIT_OK
    told.folder.open(told.base, told.axes)
    log(f"sweep      {len(told.points)} runs over {', '.join(told.axes)}, in {told.folder.path}")
    command = [sys.executable, "-m", "jaxpar.train", told.name, *told.common]
    runner = Runner(told.folder, command)
    runner.run(told.points)
    _results(told, log)
    if runner.stopped_by:
        log(f"{runner.stopped_by}: stopped; the same command continues")
        return exit_codes.EXIT_PREEMPTED
    if runner.failed:
        log(f"failed: {', '.join(runner.failed)}; the same command tries again")
        return exit_codes.EXIT_ERROR
    return exit_codes.EXIT_OK


def _results(told: Sweep, log: Callable[[str], None]) -> None:
    """Log how often the step was compiled, and the ranked runs; write the report."""
    folders = [told.folder.run_dir(point) for point in told.points]
    runs = [read_run(str(f)) for f in folders if (f / "metrics.jsonl").is_file()]
    if not runs:
        return
    counts = [told.folder.compiled(point) for point in told.points]
    compiled, read = (sum(n) for n in zip(*counts, strict=True))
    times = lambda n: "once" if n == 1 else f"{n} times"  # noqa: E731
    log(f"compiled   the train step {times(compiled)}, and read from the cache {times(read)}")
    ranked = listing.summaries(runs)
    log("\n".join(["", *lines(ranked)]))
    best = {summary.name: rank for rank, summary in enumerate(ranked)}
    shown = sorted(runs, key=lambda run: best[run.name])[:MAX_RUNS_OF_REPORT]
    path = told.folder.path / "report.html"
    atomic.write(path, page(shown, datetime.now().astimezone()))
    log(f"\nreport     {path}")
    if len(listing.together(ranked)) == 1:
        first = told.points[[str(f) for f in folders].index(shown[0].name)]
        log(f"best       {shlex.join(first.flags)}")
