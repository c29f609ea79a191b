"""Starts the launcher of one of several hosts, and serves the rendezvous."""

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpar.config import Config, ConfigError
from jaxpar.runtime import exit_codes
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.processes import mtls
from jaxpar.runtime.processes.addresses import is_here, is_loopback, joined, resolved, split
from jaxpar.runtime.processes.children import POLL_SECONDS
from jaxpar.runtime.processes.hosts import options
from jaxpar.runtime.processes.hosts.agent import Agent
from jaxpar.runtime.processes.hosts.copies import Copies, MakesServer
from jaxpar.runtime.processes.hosts.membership import Membership
from jaxpar.runtime.processes.hosts.service import PORT_TAKEN
from jaxpar.runtime.processes.hosts.store import Service
from jaxpar.runtime.processes.launch_options import LaunchOptions, ServeOptions
from jaxpar.runtime.processes.launcher import CopiesInMemory, report, shares_of_gpus
from jaxpar.runtime.processes.token import TOKEN_FILE, RunToken, given_token, token_of

type OnSignals = Callable[[Callable[[signal.Signals], None]], None]


def serve(asked: ServeOptions, on_signals: OnSignals) -> int:
    """Serve the rendezvous until a signal.

    Raises:   ConfigError if the address is none of this host; RunError if its port is taken.
    """
    stopped: list[signal.Signals] = []
    on_signals(stopped.append)
    options.check_address("--serve-rendezvous", asked.address)
    host, port = _split(asked.address)
    bound = _bound(host)
    if bound is None:
        rule, fix = "is not this host", "use one of its names or addresses"
        raise ConfigError("--serve-rendezvous", asked.address, rule, fix)
    service = Service(joined(bound, port))
    if not service.wait_until_serving():
        raise RunError(f"--serve-rendezvous {asked.address}: port {port} is in use")
    report(f"serving the rendezvous {asked.address}, on {service.address}")
    while not stopped:
        if service.ended() is not None:
            raise RunError(f"the rendezvous {asked.address} has ended")
        time.sleep(POLL_SECONDS)
    service.end()
    return report(f"stopped by {stopped[0].name}", exit_codes.EXIT_OK)


def run(
    asked: LaunchOptions,
    args: list[str],
    cfg: Config,
    on_signals: OnSignals,
    memory: CopiesInMemory | None,
    makes_server: MakesServer,
) -> int:
    """Train on this host, with the launchers of the others. Returns:  the run's exit code.

    Args:     args, cfg: of the run. memory: where its processes keep copies of the state; None:
              nowhere. makes_server: serves these to other hosts.
    Raises:   ConfigError for GPUs that cannot be shared, addresses that the others cannot use, and
              a token that is missing or cannot be read.
    """
    token = _token(cfg)
    gpus = shares_of_gpus(asked.num_processes) if not cfg.run.cpu_devices else []
    mtls.arguments()  # as the coordinator of a generation has them, in a process of its own
    each = cfg.run.cpu_devices * asked.num_processes
    devices = each or (len(visible.visible_gpu_ids()) if gpus else asked.num_processes)
    stopped: list[signal.Signals] = []
    on_signals(stopped.append)
    with contextlib.ExitStack() as until_the_end:
        service = _served_here(asked)
        if service is not None:
            until_the_end.callback(service.end)
        own: dict[str, Any] = {"address": _address(asked, stopped), "devices": devices}
        own |= {"name": asked.host_name or socket.gethostname(), "processes": asked.num_processes}
        copies = None
        if memory is not None:
            server = makes_server(memory.folder, own["address"], token)
            copies = Copies(memory, until_the_end.enter_context(server), token)
            own["piece_port"] = copies.port
        run = cfg.run.store or str(cfg.run.dir)  # beside a store, folders may be elsewhere
        here = Membership(asked.rendezvous, run, own, asked.heartbeat_seconds, token)
        until_the_end.callback(here.close)
        agent = Agent(asked, args, cfg, gpus, here, copies)
        on_signals(agent.stop)
        if stopped:
            agent.stop(stopped[0])
        code = agent.run()
        if service is not None:
            _linger(here, asked)
        return code


def _token(cfg: Config) -> RunToken:
    """Return the run's token. Raises:   ConfigError."""
    if cfg.run.store and given_token() is None:
        rule = "is needed with --nodes and run.store: the hosts need share no folder to find it in"
        fix = "put the same secret on every host, and set it to the file's path"
        raise ConfigError(TOKEN_FILE, "", rule, fix)
    return token_of(Path(cfg.run.dir))


def _address(asked: LaunchOptions, stopped: list[signal.Signals]) -> str:
    """Return this host's address, once the rendezvous has one: names of new pods come late.

    Raises:   RunError after --wait-seconds.
    """
    until, told = time.monotonic() + asked.wait_seconds, False
    while not (own := options.own_address(asked)):
        host = _split(asked.rendezvous)[0]
        if not told:
            report(f"the rendezvous {host} has no address that this host can reach; waiting")
            told = True
        if stopped or time.monotonic() > until:
            limit = f"{asked.wait_seconds:g} s, --wait-seconds"
            raise RunError(f"the rendezvous {host} is unknown or out of reach, after {limit}")
        time.sleep(POLL_SECONDS)
    return own


def _served_here(asked: LaunchOptions) -> Service | None:
    """Serve the rendezvous if HOST is this host, and nobody serves it here yet."""
    host, port = _split(asked.rendezvous)
    bound = _bound(host)
    if bound is None:
        return None
    service = Service(joined(bound, port))
    if service.wait_until_serving():
        report(f"serving the rendezvous on {service.address}")
        return service
    if service.ended() != PORT_TAKEN:
        raise RunError(f"cannot serve the rendezvous on {service.address}")
    return None


def _bound(host: str) -> str | None:
    """Return the address of this host to listen on; None if `host` is another one."""
    here = [one for one in resolved(host) if is_here(one)]
    if not here:
        return None
    seen = [one for one in here if not is_loopback(one)]
    if seen or is_loopback(host):
        return (seen or here)[0]
    return "0.0.0.0"  # a name that is 127.0.1.1 here, as on Debian, and another address elsewhere


def _linger(membership: Membership, asked: LaunchOptions) -> None:
    """Serve on until the others have read how the run ended."""
    until = time.monotonic() + 2 * asked.heartbeat_seconds
    while time.monotonic() < until:
        seen = membership.turn()
        if seen is not None:
            others = [
                seen.hosts[name] for name in sorted(seen.alive) if name != membership.own.name
            ]
            if all(host.left for host in others):
                return
        time.sleep(POLL_SECONDS)


def _split(address: str) -> tuple[str, int]:
    found = split(address)
    assert found is not None  # checked with the command line
    return found
