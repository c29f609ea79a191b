"""Repeat the tests that wait, while spinning processes keep every core busy.

    python -m tests.repeat_waits [--rounds 20] [pytest's options and files]

Such a test (marker `waits`) waits for a process, a thread, a socket, a page or a signal. It may not
depend on how busy the machine is. Stops at the first failure, with its exit code.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import time

SELECTED = "waits and not slow and not gpu"


def spin() -> None:
    """Keep a core busy while the parent lives."""
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(1 << 20):
            pass


def main() -> int:
    """Run the rounds. Returns:  the exit code of the first one that fails, or 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--select", default=SELECTED, help="pytest's -m (default: %(default)s)")
    asked, others = parser.parse_known_args()
    cores = len(os.sched_getaffinity(0))
    spinning = [multiprocessing.Process(target=spin, daemon=True) for _ in range(cores)]
    for process in spinning:
        process.start()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", asked.select, *others]
    for number in range(1, asked.rounds + 1):
        began = time.monotonic()
        code = subprocess.run(command).returncode
        took = f"{time.monotonic() - began:.0f} s, {cores} cores kept busy"
        print(f"round {number} of {asked.rounds}: exit code {code} after {took}", flush=True)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
