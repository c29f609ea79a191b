"""Runs the points of a sweep on this host, one after the other."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from jaxpar.config import Config, ConfigError, declared
from jaxpar.config.declared import Name
from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.config.serialize import to_json
from jaxpar.monitoring.outline import outline
from jaxpar.runtime import exit_codes
from jaxpar.runtime.exit_codes import EXIT_NUMERICS
from jaxpar.runtime.files import atomic, json_lines
from jaxpar.runtime.files.lock import create_in
from jaxpar.runtime.gpus.visible import gpu_is_present
from jaxpar.runtime.processes import children
from jaxpar.runtime.signals import heeded
from jaxpar.runtime.stages import stage
from jaxpar.tools.sweeps.grid import SweepPoint

# ------------ The folder of a sweep: its runs, the record of how they ended, and what is left to do


FILE = "sweep.json"


class SweepFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of FILE."""

    axes: list[Name]
    """The fields of the grid."""
    config: dict[str, dict[str, Any] | None]
    """What all runs have in common."""
    ended: dict[str, Annotated[int, msgspec.Meta(ge=0, le=255)]] = {}
    """Exit codes by the name of a run."""


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep. Each run has a folder in it, and a log, NAME.log."""

    path: Path

    def run_dir(self, point: SweepPoint) -> Path:
        """The folder of a run."""
        return self.path / point.name

    def log(self, point: SweepPoint) -> Path:
        """The output of a run."""
        return self.path / f"{point.name}.log"

    def open(self, base: Config, axes: list[str]) -> None:
        """Make the folder, or check that it is one of the same sweep.

        Args:     base: the config without the values of the grid, whose fields are `axes`.
        Raises:   ConfigError if it is another sweep's, or cannot be written.
        """
        about = SweepFile(axes=axes, config=_without(json.loads(to_json(base)), axes))
        before = self._read()
        if before is not None:
            self._require_same(before, about)
            about = msgspec.structs.replace(about, ended=before.ended)
        with create_in(self.path):
            self._write(about)

    def ended(self, point: SweepPoint, code: int) -> None:
        """Record the exit code of a run."""
        about = self._read()
        if about is not None:  # else it has been deleted
            self._write(msgspec.structs.replace(about, ended={**about.ended, point.name: code}))

    def state(self, point: SweepPoint) -> str:
        """Return "finished", "diverged", "started" or "new"."""
        run_dir = self.run_dir(point)
        about = self._read()
        ended = about.ended.get(point.name) if about is not None else None
        if ended == EXIT_NUMERICS and run_dir.is_dir():
            return "diverged"
        last, num_steps = last_step(run_dir), _num_steps(run_dir, point.cfg)
        saves = bool(point.cfg.checkpoint.every)
        saved = (run_dir / "checkpoints" / str(num_steps)).is_dir()
        if last >= num_steps and (saved or not saves):
            return "finished"
        return "started" if last else "new"

    def compiled(self, point: SweepPoint) -> tuple[int, int]:
        """Return how often the train step of a run was compiled, and how often it was read from
        the compilation cache, over all attempts."""
        events = json_lines.read(self.run_dir(point) / "events.jsonl")
        found = [bool(e.get("from_cache")) for e in events if e.get("event") == "compiled"]
        return found.count(False), found.count(True)

    def _require_same(self, before: SweepFile, about: SweepFile) -> None:
        then, now = _flat(before.config), _flat(about.config)
        changed = [p for p in {**then, **now} if then.get(p) != now.get(p)]
        if before.axes != about.axes:
            rule = f"has a sweep of {', '.join(before.axes)}"
        elif changed:
            told = ", ".join(f"{path} {repr(then.get(path))[:100]}" for path in changed[:10])
            rule = f"has a sweep of another config, with {told}"
        else:
            return
        raise ConfigError("--folder", str(self.path), rule, "use another --folder")

    def _read(self) -> SweepFile | None:
        path = self.path / FILE
        try:
            return declared.read(SweepFile, path, what="it")
        except FileNotFoundError:
            return None
        except (OSError, UnreadableJson) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            rule, fix = f"has a {FILE} that cannot be used: {why}", "use another --folder"
            raise ConfigError("--folder", str(self.path), rule, fix) from error

    def _write(self, about: SweepFile) -> None:
        atomic.write(self.path / FILE, (declared.to_json(about, indent=2) + "\n").encode())


def _num_steps(run_dir: Path, cfg: Config) -> int:
    """Return the steps of a run: those of its config.json, since data may decide their number."""
    try:
        return int(read_json_object(run_dir / "config.json")["train"]["num_steps"])
    except (OSError, UnreadableJson, KeyError, TypeError, ValueError):
        return cfg.train.num_steps


def last_step(run_dir: Path) -> int:
    """Return the last step with metrics; 0 if there is none."""
    return outline(run_dir / "metrics.jsonl").last_step


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    sections = ((name, fields or {}) for name, fields in config.items())
    return {f"{s}.{name}": value for s, fields in sections for name, value in fields.items()}


def _without(config: dict[str, Any], axes: list[str]) -> dict[str, Any]:
    """Return a config without the fields of the grid, and those that the sweep sets."""
    for path in [*axes, "run.dir", "optimizer.schedule_as_input"]:
        node = config
        *sections, name = path.split(".")
        for section in sections:
            node = node.get(section) or {}
        node.pop(name, None)
    if "train.num_tokens" in axes:  # it sets the number of steps
        config["train"].pop("num_steps", None)
    return config


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
