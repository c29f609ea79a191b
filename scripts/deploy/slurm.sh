#!/bin/bash
# A run on many nodes of a Slurm cluster, one process per node with all of its GPUs:
#
#     sbatch --nodes=4 scripts/deploy/slurm.sh llama3_8b --parallel.tensor 2
#
# Submit it from the repository's folder. All nodes must see this folder, the data and the run folder.
# Slurm sends SIGTERM 5 minutes before the time limit. The run saves and exits with code 75, and the
# job is queued again and resumes. docs/clusters.md explains.
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
# How often a run that failed for another reason is restarted.
max_restarts="${MAX_RESTARTS:-10}"
python="${PYTHON:-.venv/bin/python}"

# Otherwise gRPC would send the traffic between processes through a proxy.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY

# If a process fails, Slurm ends the others, so that none waits for it. srun's exit code is the highest
# of all, which may be that of an ended process. The exit code of the first is in srun's output.
ends="$(mktemp)"
srun --kill-on-bad-exit=1 --label "$python" -u -m jaxpar.train "$@" 2>&1 |
  awk -v ends="$ends" '{ print; fflush() } /^srun: error: .*: tasks? / { print > ends; fflush(ends) }'
code=${PIPESTATUS[0]}
first="$(sed -n '1s/.*: Exited with exit code \([0-9]*\)$/\1/p' "$ends")"
rm -f "$ends"
code="${first:-$code}"

case "$code" in
  0 | 2 | 17) ;; # completed; invalid config; bad numerics
  75)
    echo "preempted and saved: requeuing"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
  *)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_restarts" ]; then
      echo "failed with exit code $code: requeuing after restart ${SLURM_RESTART_COUNT:-0} of $max_restarts"
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$code"
