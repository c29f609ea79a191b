"""Prints a sweep as a Slurm job array, with one run in each task."""

import itertools
import shlex
from collections.abc import Sequence

from jaxpar.config import ConfigError
from jaxpar.config.printable import printable

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
