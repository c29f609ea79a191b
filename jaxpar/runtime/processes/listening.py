"""The address on which the coordinator, in process 0, listens for the other processes.

JAX's coordination service asks for no password. It therefore listens only on the address that the
run names, not on every network of the host.
"""

import errno
import os
import socket

from jaxpar.runtime.messages import warn
from jaxpar.runtime.processes.detect import ProcessPlace, is_loopback
from jaxpar.runtime.processes.peers import PeersMissing

#: JAX's variable for the address to listen on, which is used as it is.
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"


class PortTaken(PeersMissing):
    """No process can connect, since another program uses the coordinator's port."""


def bind_address(cluster: ProcessPlace) -> str | None:
    """Return host:port for process 0 to listen on; None for every address of this host.

    None if the coordinator's name resolves to no address of this host that others
    can reach: behind a Kubernetes service or a NAT, or if /etc/hosts has 127.0.1.1 for the host's
    own name.
    """
    if BIND_ADDRESS in os.environ:
        return os.environ[BIND_ADDRESS]
    if is_loopback(cluster.host):
        return cluster.coordinator
    found = _addresses(cluster.host)
    own = [address for address in found if _is_here(address)]
    reached = own if cluster.num_hosts == 1 else [one for one in own if not is_loopback(one)]
    if not reached:
        return None
    port = cluster.coordinator.rpartition(":")[2]
    one = f"[{reached[0]}]:{port}" if ":" in reached[0] else f"{reached[0]}:{port}"
    return cluster.coordinator if len(reached) == len(found) else one


def warn_if_open(cluster: ProcessPlace, bound: str | None) -> None:
    """Warn if the coordinator listens on every address of this host.

    Args:     bound: from `bind_address`.
    """
    if bound is None:
        told = f"the coordinator listens on every network of {socket.gethostname()}: "
        told += f"{cluster.host} is none of its addresses; {BIND_ADDRESS}=ADDRESS:PORT names one"
        warn(told)


def _addresses(host: str | None, flags: int = 0) -> list[str]:
    """Return the addresses of a name, without duplicates; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_here(address: str) -> bool:
    """Return whether an address is one of this host."""
    return _bind_error(address, 0) != errno.EADDRNOTAVAIL


def _bind_error(address: str, port: int) -> int:
    """Try to bind an address, and return the number of the error; 0 if it worked."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the coordinator does, since `jaxpar.launch` reserves the port with this option.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind((address, port))
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return 0


def check_free(cluster: ProcessPlace, bound: str | None) -> None:
    """Check that no other program uses the coordinator's port, on which JAX would crash.

    Args:     bound: from `bind_address`.
    Raises:   PortTaken.
    """
    host, _, port = (bound or cluster.coordinator).rpartition(":")
    found = _addresses(host.strip("[]")) if bound else _addresses(None, socket.AI_PASSIVE)
    if any(_bind_error(address, int(port)) == errno.EADDRINUSE for address in found):
        fix = "end it, or use another --cluster.coordinator HOST:PORT in all processes"
        told = f"{cluster}: another program on this host uses port {port}. Fix: {fix}"
        raise PortTaken(told)
