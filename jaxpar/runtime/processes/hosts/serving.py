"""Serves the rendezvous of several hosts."""

import signal
import time

from jaxpar.config import ConfigError
from jaxpar.runtime import exit_codes
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.addresses import is_here, is_loopback, joined, resolved
from jaxpar.runtime.processes.children import POLL_SECONDS
from jaxpar.runtime.processes.hosts import options
from jaxpar.runtime.processes.hosts.agent import report
from jaxpar.runtime.processes.hosts.membership import Membership
from jaxpar.runtime.processes.hosts.service import PORT_TAKEN
from jaxpar.runtime.processes.hosts.store import Service
from jaxpar.runtime.processes.launch_options import ServeOptions


def serve(asked: ServeOptions) -> int:
    """Serve the rendezvous until a signal.

    Raises:   ConfigError if the address is none of this host; RunError if its port is taken.
    """
    stopped: list[signal.Signals] = []
    children.on_signals(stopped.append)
    host, port = options.checked_address("--serve-rendezvous", asked.address)
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


def served_here(rendezvous: str) -> Service | None:
    """Serve the rendezvous if HOST is this host, and nobody serves it here yet."""
    host, port = options.checked_address("--rendezvous", rendezvous)
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


def linger(membership: Membership, seconds: float) -> None:
    """Serve on until the others have read how the run ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        seen = membership.turn()
        if seen is not None:
            others = seen.alive - {membership.own.name}
            if all(seen.hosts[name].left for name in others):
                return
        time.sleep(POLL_SECONDS)
