"""Lose hosts of an elastic run at random times, and compare its goodput with the simulator's.

    python scripts/measure/random_failures.py --hosts 2 --least 1 --seconds 320 --mtbf 90 --back 30
    python scripts/measure/random_failures.py --gpus-per-host 1 --limit 560 --seconds 150 \\
        --mtbf 60 --back 25 --every 100 --memory-every 15 -- llama_1b --data.path data/stdlib ...

Hosts are launchers of one machine, each with its own devices, name and copies of the state in
memory; another process serves the rendezvous. All processes of a host are killed at exponentially
distributed times, and its launcher starts again --back seconds later. It trains for --seconds after
the first step: with copies of the state in memory beside saves to disk, then with the disk alone.
The first generations of a run on GPUs are not measured: they compile for each number of hosts.

Without a config after --, the hosts train the tests' model on simulated devices, with 0.3 s a step.

A run on GPUs needs --data.path and a model whose dims 4, 3 and 2 divide, such as --model.d-model
1536. --limit is for everything: after the first generations, it leaves the runs what remains.

Prints each loss, and for both runs the goodput, what the time went into, and what
`python -m jaxpar.goodput` predicts from the run's own times of steps, saves and restarts.
--card writes all of it as JSON, with the time of each step.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.goodput.failures import HOUR, KINDS, Interruption, Rates, failures  # noqa: E402
from jaxpar.memory_checkpoint.places import SHARED_MEMORY  # noqa: E402
from jaxpar.monitoring.goodput import GENERATION, read_events  # noqa: E402
from jaxpar.runtime.gpus import visible  # noqa: E402
from jaxpar.runtime.processes.children import tail  # noqa: E402
from scripts.measure import random_failures_report as report  # noqa: E402
from scripts.measure.random_failures_report import Seen, Trial  # noqa: E402
from tests import ranks  # noqa: E402
from tests.e2e.hosts.elastic import SIZES, ElasticRun  # noqa: E402
from tests.e2e.hosts.same_machine import SameMachine  # noqa: E402

#: Steps that a generation takes on each number of hosts before runs on GPUs are measured.
WARM_STEPS = 12

#: Seconds of a run before its first step, and the fewest after it, under --limit.
STARTS, FEWEST = 45.0, 30.0

#: Arguments of every run. It ends when it is killed.
OF_ALL = (
    *("--train.num-steps", "1000000", "--train.log-every", "1", "--evaluation.every", "0"),
    *("--checkpoint.keep", "2", "--metrics.tensorboard", "False"),
)

_MEMBERS = re.compile(r"^launch: generation (\d+): .* hosts train: ([^;\n]+)", re.MULTILINE)


class StepsSeen:
    """Follows RUN/metrics.jsonl: when each record of a step was there."""

    def __init__(self, run_dir: Path):
        self._file, self._at = run_dir / "metrics.jsonl", 0
        self.steps: list[Seen] = []

    def look(self) -> None:
        """Take what is new."""
        if not self._file.exists():
            return
        with open(self._file, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                record = json.loads(line)
                if "loss" in record:
                    seconds = record.get("step_seconds")
                    self.steps.append(Seen(time.time(), record["step"], seconds, record["loss"]))


class Hosts:
    """The hosts of one run."""

    def __init__(
        self, machine: SameMachine, folder: Path, asked: argparse.Namespace, memory_every: int
    ):
        """Args:     folder: of the run and the launchers' logs; new."""
        folder.mkdir()
        self.folder, self.run_dir, self.asked = folder, folder / "run", asked
        self.seen = StepsSeen(self.run_dir)
        config, *own = asked.config or [
            ranks.write_config(folder),
            *SIZES,
            "--optimizer.learning-rate",
            "1e-3",
        ]
        args = [*own, "--run.dir", str(self.run_dir), *OF_ALL]
        args += ["--checkpoint.every", str(asked.every)]
        args += ["--checkpoint.memory-every", str(memory_every)]
        options = ["--nodes", f"{asked.least}:{asked.hosts}", "--join-seconds", "120"]
        options += ["--heartbeat-seconds", str(asked.heartbeat_seconds)]
        devices, env = (
            0 if asked.gpus_per_host else 1,
            {} if asked.config else {"FAULT": "0 1 slow"},
        )
        self.run = ElasticRun(machine, folder, config, options, args, devices=devices, **env)

    def start(self) -> None:
        """Start all hosts, and wait for the first step."""
        for host in range(self.asked.hosts):
            self.run.start(host)
        self.wait(lambda: bool(self.seen.steps))

    def wait(self, happened: Callable[[], bool]) -> None:
        """Wait until a function returns true; no longer than --start-seconds."""
        until = time.monotonic() + self.asked.start_seconds
        while not happened():
            if time.monotonic() > until:
                self.fail(f"no step after --start-seconds {self.asked.start_seconds:g}")
            self.look()
            time.sleep(0.02)

    def look(self) -> None:
        """Take new steps, and check that no launcher has ended by itself."""
        self.seen.look()
        for host, launcher in self.run.launchers.items():
            if launcher.poll() is not None:
                self.fail(f"the launcher of host {host} ended with {launcher.returncode}")

    def fail(self, why: str) -> None:
        """End the program, with the ends of the launchers' logs."""
        logs = sorted(self.folder.glob("*.log")) + sorted(self.run_dir.glob("logs/*.log"))
        ends = [f"--- end of {log.name}\n{tail(log)}" for log in logs]
        raise SystemExit("\n".join([*ends, why]))

    def members(self) -> list[int]:
        """The hosts of the newest generation, as the launchers say."""
        said = [self.run.said(host) for host in self.run.launchers]
        found = [match for text in said for match in _MEMBERS.findall(text)]
        _, names = max(found, key=lambda one: int(one[0]))
        return [self.run.network.names.index(name) for name in names.split(", ")]

    def generations(self) -> list[dict[str, Any]]:
        """The first steps of generations so far."""
        return [e for e in read_events(self.run_dir) if e["event"] == GENERATION]


def warmed(hosts: Hosts) -> None:
    """Take steps on each number of hosts, so that all programs are in the compilation cache."""
    asked = hosts.asked
    hosts.start()
    for count in range(asked.hosts, asked.least - 1, -1):
        of_count = lambda n=count: any(len(e["hosts"]) == n for e in hosts.generations())  # noqa: E731
        hosts.wait(of_count)
        steps = len(hosts.seen.steps)
        hosts.wait(lambda steps=steps: len(hosts.seen.steps) >= steps + WARM_STEPS)
        print(f"{count} hosts have taken {WARM_STEPS} steps", flush=True)
        if count > asked.least:
            hosts.run.kill(count - 1)


def failures_of(asked: argparse.Namespace) -> Iterator[Interruption]:
    """Return the random failures. All hosts together have one every --mtbf seconds."""
    return failures(rates(asked), asked.hosts, 1, asked.seed)


def rates(asked: argparse.Namespace) -> Rates:
    """Return the rates of the simulator: hosts fail, and nothing else does."""
    never = dict.fromkeys(KINDS, float("inf"))
    return Rates(**never | {"host": asked.hosts * asked.mtbf / HOUR})


def tried(hosts: Hosts, name: str, memory_every: int) -> Trial:
    """Train and lose hosts for --seconds after the first step."""
    asked = hosts.asked
    hosts.start()
    began = hosts.seen.steps[0].time
    coming, lost, back = failures_of(asked), [], []
    away: list[tuple[float, int]] = []  # when each lost host comes back
    due = next(coming)
    while (now := time.time() - began) < asked.seconds:
        hosts.look()
        while away and away[0][0] <= now:
            _, host = away.pop(0)
            hosts.run.start(host)
            back.append((now, host))
            print(f"{now:7.1f} s  host {host} is back", flush=True)
        if due.time > now:
            time.sleep(min(0.02, due.time - now))
            continue
        if due.host in hosts.run.launchers and due.host in hosts.members():
            hosts.run.kill(due.host)
            away.append((now + asked.back, due.host))
            lost.append((now, due.host))
            step = hosts.seen.steps[-1].step
            print(f"{now:7.1f} s  host {due.host} is lost, after step {step}", flush=True)
        due = next(coming)
    hosts.look()
    steps = [one._replace(time=one.time - began) for one in hosts.seen.steps]
    events = [e | {"time": e["time"] - began} for e in read_events(hosts.run_dir)]
    inside = [one for one in steps if one.time <= asked.seconds]
    return Trial(name, memory_every, asked.seconds, asked.hosts, inside, lost, back, events)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--hosts", type=int, default=4, help="an even number (4)")
    made.add_argument("--least", type=int, default=2, help="fewest hosts that train (2)")
    made.add_argument("--gpus-per-host", type=int, default=0, help="0: simulated devices (0)")
    made.add_argument("--seconds", type=float, default=600.0, help="of each run (600)")
    text = "mean seconds between losses while all hosts are there (120)"
    made.add_argument("--mtbf", type=float, default=120.0, help=text)
    made.add_argument("--back", type=float, default=30.0, help="seconds until a host is back (30)")
    made.add_argument("--every", type=int, default=100, help="steps between checkpoints (100)")
    made.add_argument("--memory-every", type=int, default=5, help="and between copies (5)")
    made.add_argument("--only", choices=("memory", "disk"), help="one of the two runs")
    made.add_argument("--heartbeat-seconds", type=float, default=5.0, help="(5)")
    made.add_argument("--start-seconds", type=float, default=300.0, help="most until a step (300)")
    made.add_argument("--warmed", action="store_true", help="every program was compiled before")
    text = "seconds for everything: the runs become shorter"
    made.add_argument("--limit", type=float, default=float("inf"), help=text)
    made.add_argument("--seed", type=int, default=0, help="of the losses (0)")
    text = f"on a file system in memory ({SHARED_MEMORY})"
    made.add_argument("--memory-folder", type=Path, default=Path(SHARED_MEMORY), help=text)
    made.add_argument("--folder", type=Path, help="of the runs, new; kept. Else a temporary one")
    made.add_argument("--card", type=Path, help="JSON file to write")
    made.add_argument("config", nargs="*", metavar="CONFIG", help="after --, with its arguments")
    return made


def read_command() -> argparse.Namespace:
    """Parse and check the command line."""
    args = sys.argv[1:]
    own = args[: args.index("--")] if "--" in args else args
    made = parser()
    asked = made.parse_args(own)
    if asked.config:
        made.error(f"{asked.config[0]} comes before --. Fix: -- {' '.join(asked.config)}")
    asked.config = args[len(own) + 1 :]
    if asked.hosts % 2 or not 1 <= asked.least <= asked.hosts:
        made.error("--hosts must be even, as the simulator mirrors in pairs, and at least --least")
    if asked.gpus_per_host and not asked.config:
        made.error("--gpus-per-host needs a config. Fix: -- llama_1b ...")
    return asked


def measured(asked: argparse.Namespace, folder: Path) -> None:
    """Run both kinds of runs, print, and write the card."""
    began, trials = time.monotonic(), list[Trial]()
    visible_gpus = visible.visible_gpu_ids()[: asked.hosts * asked.gpus_per_host]
    each = itertools.batched(visible_gpus, max(asked.gpus_per_host, 1))
    gpus = [",".join(of_host) for of_host in each]
    machine = lambda: SameMachine(asked.hosts + 1, gpus, asked.memory_folder)  # noqa: E731
    if asked.gpus_per_host and not asked.warmed:
        with machine() as its:
            warmed(Hosts(its, folder / "warm", asked, asked.memory_every))
        shutil.rmtree(folder / "warm")
    both = {"memory": ("memory and disk", asked.memory_every), "disk": ("disk alone", 0)}
    kinds = {kind: both[kind] for kind in both if asked.only in (None, kind)}
    left = (asked.limit - (time.monotonic() - began)) / len(kinds) - STARTS
    asked.seconds = min(asked.seconds, left)
    if asked.seconds < FEWEST:
        raise SystemExit(f"--limit {asked.limit:g} leaves {asked.seconds:.0f} s for a run")
    for kind, (name, every) in kinds.items():
        load = os.getloadavg()[0]
        print(f"{name}, for {asked.seconds:.0f} s; load average {load:.1f}", flush=True)
        with machine() as its:
            hosts = Hosts(its, folder / kind, asked, every)
            trials.append(tried(hosts, name, every))
        manifest = json.loads((hosts.run_dir / "manifest.json").read_text("utf-8"))
        if asked.folder is None:
            shutil.rmtree(folder / kind)
        found = report.of_trials(trials, asked.every, asked.back, asked.least, rates(asked))
        if asked.card:
            about = {"options": vars(asked), "manifest": manifest, "load_average": load}
            asked.card.write_text(json.dumps(about | found, default=str, indent=1) + "\n", "utf-8")
        print(report.as_text(found), flush=True)


def main() -> None:
    """Run the command line."""
    asked = read_command()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # ends all hosts
    if not asked.gpus_per_host:
        from tests.conftest import compile_quickly  # which needs pytest

        compile_quickly()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="random_failures"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        measured(asked, folder)
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
