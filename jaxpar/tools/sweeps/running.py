"""Runs the points of a sweep on this host, one after the other."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.runtime import exit_codes
from jaxpar.runtime.gpus.visible import gpu_is_present
from jaxpar.runtime.processes import children
from jaxpar.runtime.signals import heeded
from jaxpar.runtime.stages import stage
from jaxpar.tools.sweeps.folder import SweepFolder, last_step
from jaxpar.tools.sweeps.grid import SweepPoint

#: Seconds between two looks at a run's metrics, for the line about its progress.
LOOK_EVERY = 2.0

#: How a run may end, in words.
ENDS = {
    exit_codes.EXIT_OK: "finished",
    exit_codes.EXIT_NUMERICS: "diverged",
    exit_codes.EXIT_PREEMPTED: "stopped",
}


@dataclass
class Runner:
    """Starts the runs of a sweep, one at a time. Ctrl-C and SIGTERM save the current run."""

    folder: SweepFolder
    command: Sequence[str]
    """`python -m jaxpar.train CONFIG` and the flags of all runs."""
    stopped_by: str = ""
    failed: list[str] = field(default_factory=list)

    def run(self, points: Sequence[SweepPoint]) -> None:
        """Run all points that are not finished, or until a signal."""
        width = len(str(len(points)))
        for number, point in enumerate(points, 1):
            if self.stopped_by:
                return
            told = f"run {number:>{width}}/{len(points)}  {point.name}"
            state = self.folder.state(point)
            if state in ("finished", "diverged"):
                print(f"{told}: {state} before, skipped", flush=True)
                continue
            began = time.monotonic()
            code = self._one(point, told)
            self.folder.ended(point, code)
            end = ENDS.get(code, f"failed with code {code}")
            compiled, read = self.folder.compiled(point)
            how = "step read from the compilation cache" if read and not compiled else "compiled"
            how = f", {how}" if compiled or read else ""
            print(f"{told}: {end} after {time.monotonic() - began:.0f} s{how}", flush=True)
            if code not in ENDS:
                self.failed.append(point.name)
                print(f"  {self.folder.log(point)} ends with:", file=sys.stderr)
                print(children.tail(self.folder.log(point), 5), file=sys.stderr, flush=True)

    def _one(self, point: SweepPoint, told: str) -> int:
        """Run one point. Returns its exit code, as a shell reports it."""
        flags = [*point.flags, f"--run.dir={self.folder.run_dir(point)}"]
        env = environment(os.environ, self.folder.path, point.cfg.run.cpu_devices)
        with children.held_back():
            process = children.start([*self.command, *flags], env, self.folder.log(point))
        with self._signals_to(process), stage(told) as now:
            while process.poll() is None:
                now.at(f"step {last_step(self.folder.run_dir(point)):,}")
                _wait(process, LOOK_EVERY)
        code = process.returncode
        return code if code >= 0 else 128 - code

    @contextmanager
    def _signals_to(self, process) -> Iterator[None]:
        """Send the signals that stop a program to the run; it saves and ends."""

        def send(number: int, _: object) -> None:
            self.stopped_by = signal.Signals(number).name
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

        earlier = {number: signal.signal(number, send) for number in heeded()}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(process, seconds: float) -> None:
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(children.POLL_SECONDS)


def environment(env: Mapping[str, str], folder: Path, cpu_devices: int) -> dict[str, str]:
    """Return the environment of a run. On one CPU device, runs share a compilation cache in the
    sweep's folder; on GPUs, they have that of `run.compilation_cache`.

    Programs of several CPU devices are wrong when read back (`runtime/start.py`).
    """
    own = {"PYTHONUNBUFFERED": "1"}
    if cpu_devices <= 1 and not gpu_is_present():
        own["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**own, **env}
