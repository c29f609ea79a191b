"""The options of `jaxpar.launch`, and the rules for a launcher that is one of several."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.numerals import only_digits
from jaxpar.config.options import Argument, Range, Written
from jaxpar.config.rules.limits import MAX_SECONDS
from jaxpar.config.validate import resolve
from jaxpar.runtime.processes import addresses
from jaxpar.runtime.processes.addresses import is_loopback

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


#: The most hosts of a run.
MAX_HOSTS = 100_000


def limits(nodes: str) -> tuple[int, int]:
    """Return the least and the most hosts of --nodes. Raises:   ConfigError."""
    low, colon, high = nodes.partition(":")
    high = high if colon else low
    if not (only_digits(low) and only_digits(high) and 0 < int(low) <= int(high) <= MAX_HOSTS):
        rule = f"is not MIN:MAX with 1 <= MIN <= MAX <= {MAX_HOSTS:,}"
        raise ConfigError("--nodes", nodes, rule, "use --nodes 2:4")
    return int(low), int(high)


def checked_address(name: str, address: str, rule: str = "is not HOST:PORT") -> tuple[str, int]:
    """Return host and port of an option. Raises:   ConfigError."""
    found = addresses.split(address)
    if found is None:
        fix = f"use {name} HOST:29400, the same on every host"
        raise ConfigError(name, address, rule, fix)
    return found


def check_hosts(options: LaunchOptions) -> None:
    """Check the options of a launcher that is one of several.

    Raises:   ConfigError that names the option.
    """
    limits(options.nodes)
    met = options.rendezvous
    checked_address("--rendezvous", met, "is not HOST:PORT" if met else "is needed with --nodes")
    seconds = {
        "--join-seconds": (options.join_seconds, 0.0, 10),
        "--wait-seconds": (options.wait_seconds, 1.0, 600),
        "--heartbeat-seconds": (options.heartbeat_seconds, 0.5, 5),
    }
    for name, (given, least, good) in seconds.items():
        if not least <= given <= MAX_SECONDS:  # also for NaN
            rule = f"must be at least {least:g}, and at most {MAX_SECONDS:,}"
            raise ConfigError(name, given, rule, f"use {name} {good}")
    if "/" in options.host_name or options.host_name != options.host_name.strip():
        rule = "must be a name without / or spaces around it"
        raise ConfigError("--host-name", options.host_name, rule, "use --host-name gpu01")


def obstacle(cfg: Config, devices: int) -> str:
    """Return the rule that a config breaks on a number of devices; empty if it breaks none.

    Numbers that do not divide the rows of the global batch, or a dim that is sharded, do.
    """
    if cfg.parallel.auto:
        return ""  # the planner finds a layout
    try:
        resolve(cfg, devices, explain=False)
    except ConfigError as error:
        return f"{error.field} {error.rule}"
    return ""


def own_address(options: LaunchOptions) -> str:
    """Return this host's address for the others; empty while the rendezvous has none.

    Raises:   ConfigError if it is a loopback address, but the rendezvous is not.
    """
    if options.address:
        if not addresses.is_here(options.address):
            rule, fix = "is no address of this host", "see ip addr, or remove --address"
            raise ConfigError("--address", options.address, rule, fix)
        return options.address
    host, _ = checked_address("--rendezvous", options.rendezvous)
    own = addresses.address_towards(host)
    if own is None:
        return ""  # the name is not known yet, or there is no route: the launcher tries again
    if is_loopback(own) and not is_loopback(host):
        rule = f"is the loopback address {own} on this host"
        fix = "give this host's address in its network: --address 10.0.0.1"
        raise ConfigError("--rendezvous", options.rendezvous, rule, fix)
    return own
