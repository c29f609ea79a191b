"""The address on which the coordinator, in process 0, listens for the other processes.

JAX's coordination service asks for no password. It therefore listens only on the address that the
run names, not on every network of the host.
"""

import errno
import os
import socket

from jaxpar.runtime.messages import warn
from jaxpar.runtime.processes.addresses import (
    bind_error,
    is_here,
    is_loopback,
    joined,
    resolved,
)
from jaxpar.runtime.processes.peers import PeersMissing
from jaxpar.runtime.processes.place import ProcessPlace

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
    found = resolved(cluster.host)
    own = [address for address in found if is_here(address)]
    reached = own if cluster.num_hosts == 1 else [one for one in own if not is_loopback(one)]
    if not reached:
        return None
    port = int(cluster.coordinator.rpartition(":")[2])
    return cluster.coordinator if len(reached) == len(found) else joined(reached[0], port)


def warn_if_open(cluster: ProcessPlace, bound: str | None) -> None:
    """Warn if the coordinator listens on every address of this host.

    Args:     bound: from `bind_address`.
    """
    if bound is None:
        told = f"the coordinator listens on every network of {socket.gethostname()}: "
        told += f"{cluster.host} is none of its addresses; {BIND_ADDRESS}=ADDRESS:PORT names one"
        warn(told)


def check_free(cluster: ProcessPlace, bound: str | None) -> None:
    """Check that no other program uses the coordinator's port, on which JAX would crash.

    Args:     bound: from `bind_address`.
    Raises:   PortTaken.
    """
    host, _, port = (bound or cluster.coordinator).rpartition(":")
    found = resolved(host.strip("[]")) if bound else resolved(None, socket.AI_PASSIVE)
    if any(bind_error(address, int(port)) == errno.EADDRINUSE for address in found):
        fix = "end it, or use another --cluster.coordinator HOST:PORT in all processes"
        told = f"{cluster}: another program on this host uses port {port}. Fix: {fix}"
        raise PortTaken(told)
