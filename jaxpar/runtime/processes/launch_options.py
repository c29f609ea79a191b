"""The options of `jaxpar.launch`."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.options import Argument, Range, Written
from jaxpar.config.rules.limits import MAX_SECONDS

#: Maximum processes on one host, or its cores if more: each uses a third of a GB when idle.
MAX_PROCESSES = 64


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Start the processes of a run on this host, and restart them after a failure."""

    num_processes: Annotated[int, Written(short="-n")] = 1
    """Number of processes to start on this host."""
    restarts: Annotated[int, Range(0, 1_000_000, 3)] = 3
    """Maximum restarts without a new checkpoint in between."""
    grace: float = 5.0
    """Seconds for the other processes to end after a failure, before they are killed."""
    numa: Literal["auto", "off"] = "auto"
    """auto: bind each process to the CPUs and the memory near its GPUs."""
    nodes: str = ""
    """MIN:MAX hosts, or their number: start the same command on each. Empty: one host."""
    rendezvous: str = ""
    """HOST:PORT where the launchers find one another. The launcher on HOST serves it, unless
    --serve-rendezvous does."""
    host_name: str = ""
    """This host's name in the run. Empty: its own name."""
    address: str = ""
    """This host's address for the others. Empty: that on the route to the rendezvous."""
    join_seconds: float = 10.0
    """Seconds that a new run waits for more hosts, once MIN are there."""
    wait_seconds: float = 600.0
    """Seconds to wait while fewer than MIN hosts are there, or the rendezvous does not answer."""
    heartbeat_seconds: float = 5.0
    """Seconds without a sign of life after which a host counts as lost."""

    def __post_init__(self) -> None:
        for name, value, least in (("-n", self.num_processes, 1), ("--grace", self.grace, 0)):
            if not least <= value <= MAX_SECONDS:  # also for NaN
                rule = f"must be at least {least}, and at most {MAX_SECONDS:,}"
                raise ConfigError(name, value, rule, f"use {name} {least}")
        most = max(MAX_PROCESSES, os.cpu_count() or 1)
        if self.num_processes > most:
            rule = f"must be at most {most}: more processes would exhaust this host's memory"
            fix = "use -n 8, and --run.cpu-devices for more simulated devices"
            raise ConfigError("-n", self.num_processes, rule, fix)


@dataclass(frozen=True, kw_only=True)
class LaunchRun(LaunchOptions):
    """Start the processes of a run on this host, and restart them after a failure."""

    config: ConfigArguments


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Only serve the rendezvous, so that every host of the run may be lost."""

    address: Annotated[str, Argument("HOST:PORT")]
    """Where the launchers find one another."""
