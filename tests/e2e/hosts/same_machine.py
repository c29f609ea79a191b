"""Hosts that share one machine and its address: each has its own devices, memory and name.

Needs neither root nor namespaces. Nothing separates the hosts' links, which therefore cannot be cut
or slowed. A host that is killed loses its processes and its copies of the state in memory.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from jaxpar.memory_checkpoint.places import FOLDER, SHARED_MEMORY
from tests import ranks

#: Seconds for the processes of a host to be gone. The driver frees the memory of a GPU meanwhile.
KILL_SECONDS = 60

#: Where the session lies in `ranks.stat_of`.
_SESSION = slice(3, 4)


class SameMachine:
    """So many hosts; their processes and memory are gone at the end of the `with` block.

    Args:     gpus: CUDA_VISIBLE_DEVICES of the first hosts; the others see no GPU. memory: folder
              for copies of the state, on a file system in memory.
    """

    def __init__(self, count: int, gpus: Sequence[str] = (), memory: Path = Path(SHARED_MEMORY)):
        self.names = [f"host{i}" for i in range(count)]
        self.addresses = ["127.0.0.1"] * count
        self._gpus = [*gpus, *[""] * (count - len(gpus))]
        self._memory = memory / f"jaxpar-hosts-{os.getpid()}"
        self._sessions: list[list[int]] = [[] for _ in range(count)]

    def __enter__(self) -> Self:
        self._memory.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(len(self.names)):
            self.kill(host)
        shutil.rmtree(self._memory, ignore_errors=True)

    def launch_options(self, host: int) -> list[str]:
        """The options of a host's launcher that no other has."""
        return ["--host-name", self.names[host]]

    def start(self, host: int, command: list[str], env: dict[str, str], out: Any) -> Any:
        """Start a program on a host. Args: out: an open file for what it prints."""
        memory = self._memory / self.names[host]
        memory.mkdir(exist_ok=True)
        own = {FOLDER: str(memory), "CUDA_VISIBLE_DEVICES": self._gpus[host]}
        process = subprocess.Popen(
            command,
            env=env | own,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._sessions[host].append(process.pid)
        return process

    def kill(self, host: int) -> None:
        """Kill every process of a host at once, as when its power fails, and free its memory."""
        until = time.monotonic() + KILL_SECONDS
        while pids := _processes(self._sessions[host]):
            assert time.monotonic() < until, f"still running after {KILL_SECONDS} s: {pids}"
            for pid in pids:
                _kill(pid)
            time.sleep(0.02)
        self._sessions[host].clear()
        shutil.rmtree(self._memory / self.names[host], ignore_errors=True)


def _processes(sessions: Sequence[int]) -> list[int]:
    """The processes of sessions that run."""
    if not sessions:
        return []
    wanted = [[str(session)] for session in sessions]
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if ranks.stat_of(pid)[_SESSION] in wanted and ranks.alive(pid)]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
