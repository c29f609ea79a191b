"""Runs flash-linear-attention's kernels beside ours, in a process with PyTorch."""

import json
import subprocess
from pathlib import Path

from jaxpar.bench.recurrence import contest
from jaxpar.bench.recurrence.shapes import RecurrenceProblem

PROGRAM = Path(__file__).with_name("fla_times.py")

#: Seconds until it is stopped: fla tunes its kernels at the first launch.
LIMIT = 900


def fla_rows(problem: RecurrenceProblem, python: str, repeats: int) -> list[contest.Row]:
    """Return a row for the forward, and one for forward and backward.

    Args:     python: an interpreter that has PyTorch and fla.
    """
    row = {"backend": "fla", **problem.size}
    directions = ("forward", "both")
    given = json.dumps(problem.size | {"repeats": repeats})
    try:
        done = subprocess.run(
            [python, str(PROGRAM)], input=given, capture_output=True, text=True, timeout=LIMIT
        )
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return [row | {"direction": d, "failed": contest.message(error)} for d in directions]
    if found is None:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [row | {"direction": d, "failed": said[0][:200]} for d in directions]
    versions = {name: found[name] for name in ("fla", "torch", "keys")}
    return [
        row | versions | {"direction": d} | contest.figures(problem, d, found["ms"][d])
        for d in directions
    ]
