"""Lose hosts of an elastic run at random, and compare every step with an undisturbed run.

    python scripts/measure/node_losses.py --hosts 4 --losses 30 --memory-every 5
    python scripts/measure/node_losses.py --hosts 4 --losses 30 --disk-only

Trains a tiny model in float32, compiled without LLVM's optimizations. A launcher runs on each of
several hosts, which are network namespaces (as root on Linux); another one serves the rendezvous.
Each loss is one of KINDS, on a random host, at a random step. Hosts that are lost come back now and
then, and always before fewer than the least are left.

Prints a line for each loss, and a summary: the seconds from the loss to the end of the next step,
and the steps that were repeated. Ends with 1 if a loss or gradient norm of any step, each time that
it ran, is not that of the undisturbed run on one device, to the tolerance of another mesh; or if
more steps were lost than lie between two copies of the state.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.monitoring.goodput import goodput, read_events  # noqa: E402
from tests import ranks  # noqa: E402
from tests.conftest import compile_quickly  # noqa: E402
from tests.e2e.hosts.elastic import (  # noqa: E402
    ROUNDING,
    SIZES,
    ElasticRun,
    furthest,
    last_step,
)
from tests.e2e.hosts.network import Network  # noqa: E402

#: What happens to a host: power off, link down, or power off and on.
KINDS = ("killed", "cut", "killed and started at once")

#: Seconds for a generation to take its first step, on a busy machine.
STARTS = 600

#: The fewest hosts that train, and the steps between two losses.
LEAST, BETWEEN = 2, (3, 12)

#: How often lost hosts come back while enough are left.
COME_BACK = 0.25


@dataclass(frozen=True)
class Loss:
    """What one loss cost."""

    kind: str
    host: int
    step: int
    """The last step that was recorded before it."""
    hosts: int
    """That trained afterwards."""
    noticed: float
    """Seconds from the loss until the others had declared the host lost."""
    seconds: float
    """From the loss to the end of the next step."""
    repeated: int
    """Steps that were done again."""


class Trial:
    """A run that loses hosts."""

    def __init__(self, network: Network, folder: Path, asked: argparse.Namespace):
        self.network, self.folder, self.run_dir = network, folder, folder / "run"
        self.random = random.Random(asked.seed)
        self.hosts = asked.hosts
        config = ranks.write_config(folder)
        nodes = ["--nodes", f"{LEAST}:{asked.hosts}", "--join-seconds", "120"]
        options = [*nodes, "--heartbeat-seconds", str(asked.heartbeat_seconds)]
        self.run = ElasticRun(network, folder, config, options, arguments(asked), FAULT="0 1 slow")
        self.away: list[int] = []
        self.cut: set[int] = set()

    def generations(self) -> list[dict[str, Any]]:
        """The first steps of generations so far."""
        return [e for e in read_events(self.run_dir) if e["event"] == "generation"]

    def start(self) -> None:
        """Start all hosts, and wait for the first step."""
        for host in range(self.hosts):
            self.run.start(host)
        ranks.wait_for(lambda: len(self.generations()) == 1, STARTS)

    def lose(self) -> Loss:
        """Lose a host that trains, after some steps, and wait for the next step."""
        there = [h for h in range(self.hosts) if h not in self.away]
        target = last_step(self.run_dir) + self.random.randint(*BETWEEN)
        ranks.wait_for(lambda: last_step(self.run_dir) >= target, STARTS)
        time.sleep(self.random.random())
        kind, host = self.random.choice(KINDS), self.random.choice(there)
        before, step = len(self.generations()), last_step(self.run_dir)
        began = time.time()
        if kind == "cut":
            self.network.cut(host)
            self.cut.add(host)
        else:
            self.run.kill(host)
        self.away.append(host)
        if kind == KINDS[2]:
            self.bring_back(host)
        formed = self._next(before, lambda event: bool(event["lost"]))
        seconds, first = formed["time"] - began, formed["step"]
        noticed = seconds - formed["seconds"]
        repeated = max(step - (first - 1), 0)
        return Loss(kind, host, step, len(formed["hosts"]), noticed, seconds, repeated)

    def bring_back(self, host: int) -> None:
        """Have a host take part again."""
        self.away.remove(host)
        if host in self.cut:
            self.cut.remove(host)
            self.network.heal(host)
        else:
            self.run.start(host)

    def refill(self) -> None:
        """Perhaps bring all lost hosts back, and wait until all that are there train."""
        if self.hosts - len(self.away) <= LEAST or self.random.random() < COME_BACK:
            for host in list(self.away):
                self.bring_back(host)
        there = self.hosts - len(self.away)
        ranks.wait_for(lambda: len(self.generations()[-1]["hosts"]) == there, STARTS)

    def _next(self, before: int, wanted: Any) -> dict[str, Any]:
        ranks.wait_for(lambda: any(map(wanted, self.generations()[before:])), STARTS)
        return next(filter(wanted, self.generations()[before:]))


def arguments(asked: argparse.Namespace) -> list[str]:
    """Return the arguments of both runs, after the config."""
    steps = asked.losses * (BETWEEN[1] + 8) + 40
    args = [*SIZES, "--model.num-layers", "1", "--train.num-steps", str(steps)]
    args += ["--evaluation.every", "0", "--optimizer.learning-rate", "1e-3"]
    args += ["--metrics.tensorboard", "False"]
    args += ["--checkpoint.every", str(asked.every), "--checkpoint.keep", "2"]
    in_memory = asked.memory_every and not asked.disk_only
    return [*args, "--checkpoint.memory.every", str(asked.memory_every)] if in_memory else args


def undisturbed(folder: Path, asked: argparse.Namespace) -> Path:
    """Train on one device, in one process, unless that has been done. Returns its folder."""
    if (folder / "run").exists():
        return folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jaxpar.train", ranks.write_config(folder)]
    command += [*arguments(asked), "--run.cpu-devices", "1", "--checkpoint.memory", "None"]
    subprocess.run(command, env=ranks.environment(), stdout=subprocess.DEVNULL, check=True)
    return folder / "run"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, choices=(3, 4))
    parser.add_argument("--losses", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=1e6, help="lose no more hosts after that")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--memory-every", type=int, default=0, help="steps between copies in memory")
    how.add_argument("--disk-only", action="store_true")
    parser.add_argument("--heartbeat-seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole", type=Path, help="folder of the undisturbed run, also of before")
    parser.add_argument("--folder", type=Path, help="kept; else a temporary one")
    asked = parser.parse_args()
    compile_quickly()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="node_losses"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return measured(folder, asked)
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def measured(folder: Path, asked: argparse.Namespace) -> int:
    """Lose hosts, print what each loss cost, and compare the run. Returns the exit code."""
    losses: list[Loss] = []
    whole = undisturbed(asked.whole or folder / "whole", asked)
    load, until = os.getloadavg()[0], time.monotonic() + 60 * asked.minutes
    with Network(asked.hosts + 1) as network:
        trial = Trial(network, folder, asked)
        try:
            trial.start()
            print("| loss | host | after step | hosts then | noticed | next step | repeated |")
            print("|---|---|---|---|---|---|---|")
            for _ in range(asked.losses):
                losses.append(one := trial.lose())
                row = f"| {one.kind} | {one.host} | {one.step} | {one.hosts} | {one.noticed:.1f} s "
                print(row + f"| {one.seconds:.1f} s | {one.repeated} |", flush=True)
                if time.monotonic() > until:
                    break
                trial.refill()
        finally:
            trial.run.end()
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    return judged(folder / "run", whole, asked, losses)


def judged(run: Path, whole: Path, asked: argparse.Namespace, losses: list[Loss]) -> int:
    """Print the summary. Returns the exit code."""
    most = asked.memory_every or asked.every
    apart = furthest(run, whole)
    median = statistics.median(one.seconds for one in losses)
    repeated = max(one.repeated for one in losses)
    count = sum(one.repeated for one in losses)
    print(f"{len(losses)} losses, {last_step(run)} steps; the next step after a median of ", end="")
    print(f"{median:.1f} s; {count} steps repeated, at most {repeated} of {most} at a loss")
    unwritten = last_step(run) - len(ranks.losses_of(run))
    print(
        f"{unwritten} steps have no record, as a host was lost between their copy and their record"
    )
    print("furthest from the undisturbed run, relative:", apart)
    print(goodput(read_events(run)))
    return int(repeated > most or any(apart[name] > ROUNDING[name] for name in ROUNDING))


if __name__ == "__main__":
    sys.exit(main())
