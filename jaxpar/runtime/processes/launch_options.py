"""The options of `jaxpar.launch`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jaxpar.config.rules.limits import MAX_CPU_DEVICES, Range


@dataclass(frozen=True, kw_only=True)
class OneHost:
    """The processes of one host."""

    num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of processes to start on this host."""
    devices_per_process: Annotated[int, Range(0, MAX_CPU_DEVICES, 1)] = 0
    """CPU devices to simulate in each process. 0: use the GPUs, if any, or the config's devices."""
    restarts: Annotated[int, Range(0, 1_000_000, 3)] = 3
    """Maximum restarts without a new checkpoint in between."""
    grace: float = 5.0
    """Seconds for the other processes to end after a failure, before they are killed."""
    numa: Literal["auto", "off"] = "auto"
    """auto: bind each process to the CPUs and the memory near its GPUs."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(OneHost):
    """Start the processes of a run on this host. After --: the arguments of jaxpar.train."""

    nodes: str = ""
    """MIN:MAX hosts, or their number: start the same command on each. Empty: one host."""
    rendezvous: str = ""
    """HOST:PORT where the launchers find one another. The launcher on HOST serves it, unless
    --serve-rendezvous does."""
    serve_rendezvous: str = ""
    """HOST:PORT: only serve the rendezvous, so that every host of the run may be lost."""
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
