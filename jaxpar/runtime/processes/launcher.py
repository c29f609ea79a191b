"""Launch the processes of a run on this host, and restart them after a failure."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import ConfigArguments, expand_set_options
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files.run_lock import create_in
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.addresses import FreePort
from jaxpar.runtime.processes.children import Children, Failure
from jaxpar.runtime.processes.detect import LAUNCHED
from jaxpar.runtime.processes.launch_options import LaunchOptions
from jaxpar.runtime.signals import tolerate_lost_readers


def arguments_of(config: ConfigArguments) -> list[str]:
    """Return the arguments of the processes, `jaxpar.train`.

    Raises:   ConfigError for a field that the launcher sets.
    """
    words = list(expand_set_options(config.overrides))
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, given, text = word.partition("=")
        name = name.replace("_", "-")
        if name in SET_HERE:
            path, value = name.removeprefix("--").replace("-", "_"), text if given else following
            raise ConfigError(path, value, "is set by the launcher", "remove it")
    return [config.name, *config.overrides]


#: The fields that differ between the processes.
SET_HERE = [f"--cluster.{x}" for x in ("coordinator", "num-processes", "process-id", "detect")]


class CopiesInMemory(Protocol):
    """`memory_checkpoint.places.HostMemory`: copies of the state that outlive the processes."""

    @property
    def folder(self) -> Path:
        """The folder of this host's copies."""

    def environment(self, peers: Sequence[str] = (), host: int = 0) -> dict[str, str]:
        """Return variables for the processes."""

    def newest_step(self) -> int:
        """Return the step of the latest copy; -1 without any."""


class Launcher:
    """Starts a run, and restarts it after failures until it ends."""

    def __init__(
        self,
        options: LaunchOptions,
        args: list[str],
        cfg: Config,
        memory: CopiesInMemory | None = None,
    ):
        """
        Args:     memory: where processes keep copies of the state; None: nowhere.
        Raises:   ConfigError if the GPUs cannot be shared evenly.
        """
        self.memory = memory
        self.options, self.args = options, args
        self.run_dir = Path(cfg.run.dir)
        self.gpus = shares_of_gpus(options.num_processes) if not cfg.run.cpu_devices else []
        self.running: Children | None = None
        self.stopped_by: signal.Signals | None = None

    def run(self) -> int:
        """Run until the end. Returns:  the exit code of the run."""
        previous: Failure | None = None
        newest, spent, resumed = max(self.saved()), 0, False
        while True:
            began = time.time()
            ended = self.attempt(resumed)
            code = self.settled(ended)
            if code is not None:
                return code
            failure = children.failure_of(ended, children.last_words(self.run_dir, began))
            self.tell(failure)
            on_disk, in_memory = self.saved()
            saved = max(on_disk, in_memory)
            spent = 0 if saved > newest else spent
            final = self.final(failure, previous, spent)
            if final:
                return report(final, failure.code)
            newest, spent, previous, resumed = saved, spent + 1, failure, True
            where = f"from checkpoint {saved}" if saved >= 0 else "from the beginning"
            where = f"from step {saved}, in memory" if in_memory > on_disk else where
            report(f"restarting {where}, restart {spent} of {self.options.restarts}")

    def saved(self) -> tuple[int, int]:
        """Return the step of the latest checkpoint, and of the latest copy in memory; -1 if none.

        In memory, pieces of it may be missing; the processes find out.
        """
        in_memory = self.memory.newest_step() if self.memory else -1
        return newest_checkpoint(self.run_dir), in_memory

    def attempt(self, resumed: bool) -> dict[int, int]:
        """Start all processes and wait until they end. Returns:  as `Children.wait`."""
        with contextlib.closing(FreePort("127.0.0.1")) as port:
            return self.started(f"127.0.0.1:{port.number}", resumed).wait()

    def started(self, coordinator: str, resumed: bool) -> Children:
        """Start all processes, which connect to the first one as their coordinator."""
        count = self.options.num_processes
        args = self.args + (["--checkpoint.resume", "auto"] if resumed else [])
        command = [sys.executable, "-u", "-m", "jaxpar.train", *args]
        started: list[subprocess.Popen] = []
        self.running = Children(started, self.options.grace)
        for rank in range(count):
            place = dict(zip(LAUNCHED, (coordinator, str(count), str(rank)), strict=True))
            env = os.environ | place | (self.gpus[rank] if self.gpus else {})
            env |= self.memory.environment() if self.memory else {}
            self.running.processes.append(children.start(command, env, self.log(rank)))
        if self.stopped_by:
            self.running.send(signal.SIGTERM)
        return self.running

    def log(self, rank: int) -> Path | None:
        """Return the log file of a process; None for the terminal."""
        if rank == 0:
            return None
        folder = self.run_dir / "logs"
        with create_in(self.run_dir):
            folder.mkdir(exist_ok=True)
        return folder / f"rank-{rank}.log"

    def settled(self, ended: dict[int, int]) -> int | None:
        """Return the exit code, or None after a failure."""
        codes = set(ended.values())
        if len(ended) == self.options.num_processes and codes == {exit_codes.EXIT_OK}:
            return exit_codes.EXIT_OK
        if len(ended) == self.options.num_processes and codes == {exit_codes.EXIT_PREEMPTED}:
            return exit_codes.EXIT_PREEMPTED
        ends = signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
        asked = {exit_codes.EXIT_PREEMPTED, *(-number for number in ends)}
        if self.stopped_by and codes & asked:
            # Saved, or ended during the start, before there was anything to save.
            return report(f"stopped by {self.stopped_by.name}", exit_codes.EXIT_PREEMPTED)
        return None

    def final(self, failure: Failure, previous: Failure | None, spent: int) -> str:
        """Return why there is no restart; empty if there is one."""
        if self.stopped_by:
            return f"stopped by {self.stopped_by.name}, but failed"
        return children.why_final(failure, previous, spent, self.options.restarts)

    def tell(self, failure: Failure) -> None:
        """Report the failure, with the end of the log if it is not on the terminal."""
        log = self.log(failure.rank)
        if log is not None and (end := children.tail(log)):
            print(f"--- end of {log}\n{end}\n---", file=sys.stderr)
        report(str(failure))

    def stop(self, number: signal.Signals) -> None:
        """Forward a signal: the first makes the run save and stop, the second ends it at once.

        SIGHUP is forwarded as it is, since process 0 writes to the same terminal. It never ends a
        run at once: when a terminal closes, it may come twice.
        """
        tolerate_lost_readers()
        hung_up = number == signal.SIGHUP
        if self.stopped_by and hung_up:
            return
        if self.running is not None:
            first = signal.SIGHUP if hung_up else signal.SIGTERM
            self.running.send(signal.SIGKILL if self.stopped_by else first)
        self.stopped_by = number


def report(text: str, code: int = 0) -> int:
    """Print a line of the launcher. Returns:  the code."""
    print(f"launch: {text}", file=sys.stderr, flush=True)
    return code


def shares_of_gpus(count: int) -> list[dict[str, str]]:
    """Return the environment that assigns GPUs to each process; empty if there are none.

    Raises:   ConfigError if they cannot be shared evenly.
    """
    if not visible.gpu_is_present():
        return []
    ids, name = visible.visible_gpu_ids(), "CUDA_VISIBLE_DEVICES"
    seen = len(ids)
    if seen % count or not seen:
        rule = f"{seen} GPUs cannot be shared evenly by {count} processes"
        fix = "use another -n, or --run.cpu-devices 1 for simulated devices"
        raise ConfigError("-n", count, rule, fix)
    each = seen // count
    return [{name: ",".join(ids[i * each : (i + 1) * each])} for i in range(count)]


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the latest complete checkpoint, by its folder name; -1 if none.

    Also of shards, if hosts share no folder (`jaxpar.stores.shards`).
    """
    places = "checkpoints/*", "shards/*/checkpoints/*"
    names = [p.name for place in places for p in run_dir.glob(place) if p.name.isdigit()]
    return max(map(int, names), default=-1)
