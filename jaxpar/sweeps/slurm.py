"""Prints a sweep as a Slurm job array, with one run in each task."""

import shlex
from collections.abc import Sequence

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
#SBATCH --output={folder}/slurm-%a.out

set -u
runs=(
{runs}
)
read -ra flags <<< "${{runs[$SLURM_ARRAY_TASK_ID]}}"
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

    Args:     common: the config, and the flags of all runs. runs: the flags of each run, without
              spaces in them. folder: for the tasks' output.
    """
    lines = "\n".join(f"  {shlex.quote(' '.join(flags))}" for flags in runs)
    return SCRIPT.format(
        count=len(runs),
        last=len(runs) - 1,
        folder=folder,
        runs=lines,
        python=shlex.quote(python),
        common=shlex.join(common),
    )
