#!/bin/bash
# A run on many nodes of a Slurm cluster, one process per node with all of its GPUs:
#
#     sbatch --nodes=4 scripts/deploy/slurm.sh llama3_8b --parallel.tensor 2
#
# Submit it from the repository's folder, which all nodes must see, as well as data and run folder.
# The run saves and ends with 75 on SIGTERM, which comes 5 minutes before the time limit: the job
# is then queued again, and goes on. docs/clusters.md explains.
#SBATCH --job-name=jaxpar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -u
# How often a run that failed for another reason is tried again.
max_restarts="${MAX_RESTARTS:-10}"
python="${PYTHON:-.venv/bin/python}"

# gRPC would send the processes' own talk through a proxy.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY

# If one process fails, Slurm ends the others: none waits for a dead one. srun's own code is the
# highest of all, so that of a process which it ended; how the first one ended, it says.
ends="$(mktemp)"
srun --kill-on-bad-exit=1 --label "$python" -u -m jaxpar.train "$@" 2>&1 |
  awk -v ends="$ends" '{ print; fflush() } /^srun: error: .*: tasks? / { print > ends; fflush(ends) }'
code=${PIPESTATUS[0]}
first="$(sed -n '1s/.*: Exited with exit code \([0-9]*\)$/\1/p' "$ends")"
rm -f "$ends"
code="${first:-$code}"

case "$code" in
  0 | 2 | 17) ;; # done; a config that cannot work; bad numerics
  75)
    echo "preempted, and saved: queued again"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
  *)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_restarts" ]; then
      echo "failed with $code: queued again, after restart ${SLURM_RESTART_COUNT:-0} of $max_restarts"
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$code"
