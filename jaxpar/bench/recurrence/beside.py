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
    given = json.dumps(problem.size | {"repeats": repeats})
    rows = {
        direction: {"backend": "fla", **problem.size, "direction": direction}
        for direction in ("forward", "both")
    }
    lines, failed = _run(python, given)
    for line in lines:
        found = json.loads(line)
        row = rows[found["direction"]]
        row |= {name: found[name] for name in ("fla", "torch", "keys", "kernel_ms")}
        row |= contest.figures(problem, found["direction"], found["ms"])
    return [row if "ms" in row else row | {"failed": failed} for row in rows.values()]


def _run(python: str, given: str) -> tuple[list[str], str]:
    """Return the lines of JSON that the program wrote, and what stopped it."""
    command = [python, str(PROGRAM)]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        wrote = error.stdout or b""
        text = wrote.decode() if isinstance(wrote, bytes) else wrote
        return _of_json(text), f"stopped after {LIMIT} s"
    except OSError as error:
        return [], contest.message(error)
    said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return _of_json(done.stdout), said[0][:200]


def _of_json(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
