"""A run whose launchers are on hosts of a network, one of which may only serve the rendezvous."""

import json
import sys
from pathlib import Path
from typing import Any

from tests import ranks
from tests.e2e.hosts.network import Network
from tests.e2e.hosts.same_machine import SameMachine

#: Sizes that two, three and four devices divide.
SIZES = ("--model.d-model", "24", "--train.global-batch-size", "12")

#: What a launcher prints when it serves the rendezvous.
SERVING = "serving the rendezvous"

#: The most by which a run on other meshes differs, relative: sums have another order. Those of
#: `tests/e2e/soak_matrix.py` and `scripts/measure/schedules.py`.
ROUNDING = {"loss": 1e-5, "grad_norm": 1e-4}


class ElasticRun:
    """Launchers on the first hosts of a network; the last one serves the rendezvous.

    Args:     options: of each launcher. args: of the run, after its config. devices: simulated ones
              of each host; 0: those that it has.
    """

    def __init__(
        self,
        network: Network | SameMachine,
        folder: Path,
        config: str,
        options: list[str],
        args: list[str],
        serves_here: int | None = None,
        devices: int = 1,
        **env: str,
    ):
        self.network, self.folder = network, folder
        last = len(network.names) - 1
        self.server = last if serves_here is None else serves_here
        self.rendezvous = f"{network.addresses[self.server]}:{ranks.free_port()}"
        launch = [sys.executable, "-u", "-m", "jaxpar.launch"]
        of_all = ["--rendezvous", self.rendezvous, "--run.cpu-devices", str(devices), *options]
        self.command = [*launch, *of_all, "--", config, *args]
        self.env = ranks.environment(**env)
        if not devices:
            del self.env["JAX_PLATFORMS"]
        self.launchers: dict[int, Any] = {}
        if serves_here is None:
            command = [*launch, "--serve-rendezvous", self.rendezvous]
            self.served = self._start(last, command, "rendezvous")
            self._wait_until_served()

    def start(self, host: int) -> None:
        """Start a host's launcher, again if it was lost."""
        at = self.command.index("--")
        own = self.network.launch_options(host)
        command = [*self.command[:at], *own, *self.command[at:]]
        self.launchers[host] = self._start(host, command, f"host{host}")

    def _start(self, host: int, command: list[str], name: str) -> Any:
        with open(self.folder / f"{name}.log", "a") as out:
            return self.network.start(host, command, self.env, out)

    def _wait_until_served(self) -> None:
        """Wait for the server: otherwise a launcher with its address would serve in its place."""
        log = self.folder / "rendezvous.log"
        ranks.wait_for(lambda: self.served.poll() is not None or SERVING in log.read_text())
        assert self.served.poll() is None, log.read_text()

    def kill(self, host: int) -> None:
        """Lose a host."""
        self.network.kill(host)
        self.launchers.pop(host).wait()

    def said(self, host: int) -> str:
        return (self.folder / f"host{host}.log").read_text()

    def told(self, text: str, host: int) -> int:
        """How often a host's launcher has said a text."""
        return self.said(host).count(text)

    def codes(self, seconds: float) -> dict[int, int]:
        """The exit codes of all launchers, once they have ended."""
        ranks.wait_for(lambda: all(p.poll() is not None for p in self.launchers.values()), seconds)
        return {host: process.returncode for host, process in self.launchers.items()}

    def end(self) -> None:
        """Leave nothing running."""
        for host in range(len(self.network.names)):
            self.network.kill(host)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """All records of steps, those that a restart repeated too, in the order of their writing."""
    file = run / "metrics.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [r for r in records if "loss" in r]


def last_step(run: Path) -> int:
    return max((r["step"] for r in steps_of(run)), default=0)


def furthest(run: Path, whole: Path) -> dict[str, float]:
    """The largest difference of a step from the undisturbed run, relative, each time it ran."""
    wanted = {r["step"]: r for r in steps_of(whole)}
    found = steps_of(run)
    apart = lambda r, name: abs(r[name] - wanted[r["step"]][name]) / wanted[r["step"]][name]  # noqa: E731
    return {name: max(apart(r, name) for r in found) for name in ROUNDING}


def assert_same_to_rounding(run: Path, whole: Path) -> None:
    """Every step has the loss, the gradient norm and the batch of the undisturbed run."""
    apart, found = furthest(run, whole), {r["step"] for r in steps_of(run)}
    assert found == {r["step"] for r in steps_of(whole)}
    assert all(apart[name] <= ROUNDING[name] for name in ROUNDING), apart
    batches, wanted = ranks.batches_of(run), ranks.batches_of(whole)
    assert batches and all(wanted[step] == batch for step, batch in batches.items())
