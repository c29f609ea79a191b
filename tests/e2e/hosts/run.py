"""A run over the hosts of a `Network`."""

import sys
import time
from pathlib import Path
from typing import Any

from tests import ranks
from tests.e2e.hosts.network import Network


class Run:
    """A run of one process a host, with two devices each.

    Args:     more: of the run, after its config. port: of the coordinator; None: a free one.
    """

    def __init__(
        self,
        network: Network,
        config: str,
        folder: Path,
        coordinator: str,
        *more: str,
        port: int | None = None,
    ):
        self.logs = [folder / f"host{i}.log" for i in range(len(network.names))]
        port = port or ranks.free_port()
        self.processes: list[Any] = []
        for i, log in enumerate(self.logs):
            where = ["--cluster.coordinator", f"{coordinator}:{port}"]
            where += ["--cluster.num-processes", str(len(self.logs)), "--cluster.process-id"]
            command = [sys.executable, "-m", "jaxpar.train", config, "--run.cpu-devices", "2"]
            with open(log, "a") as out:
                command += [*where, str(i), *more]
                self.processes.append(network.start(i, command, ranks.environment(), out))

    def codes(self, seconds: float) -> list[int]:
        """The exit codes of both, which end within so many seconds."""
        until = time.monotonic() + seconds
        try:
            return [p.wait(max(until - time.monotonic(), 0.01)) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def said(self, host: int) -> str:
        return self.logs[host].read_text()


def wait_for_step(run: Path, step: int, seconds: float = 90) -> None:
    """Wait until a run has written a step."""
    ranks.wait_for(lambda: max(ranks.losses_of(run), default=0) >= step, seconds)
