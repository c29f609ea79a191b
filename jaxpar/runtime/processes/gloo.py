"""Chooses the address on which Gloo listens: the collectives of CPU devices in several processes.

By default Gloo takes the address of the host's own name. On many hosts /etc/hosts has 127.0.1.1
there, and then no other host can connect.
"""

import os
from collections.abc import Callable

from jax.extend import backend

from jaxpar.jax_private.table import CPU_CLIENT, DISTRIBUTED, GLOO
from jaxpar.runtime.processes.addresses import address_towards, is_loopback
from jaxpar.runtime.processes.place import ProcessPlace

#: Names an interface to listen on, as for PyTorch.
INTERFACE = "GLOO_SOCKET_IFNAME"


def listen_where_peers_connect(
    cluster: ProcessPlace, exchange: Callable[[str], list[str]]
) -> str | None:
    """Make Gloo listen on the interface by which this host reaches the coordinator.

    Called once connected, and before JAX's backends start. `GLOO_SOCKET_IFNAME` names another
    interface.

    Args:     exchange: tells all processes a text, and returns the texts of all.
    Returns:  the address or interface; None if there is no route, which leaves JAX's choice.
    """
    own = address_towards(cluster.host)
    peers = [address for address in exchange(own or "") if address]
    if own and is_loopback(own) and not is_loopback(cluster.host):
        # The coordinator's name is this host's own: the way to a peer is the one peers come by.
        own = next(filter(None, map(address_towards, _of_other_hosts(peers))), own)
    if interface := os.environ.get(INTERFACE):
        _register(interface=interface)
        return interface
    if own:
        _register(hostname=own)
    return own


def _of_other_hosts(addresses: list[str]) -> list[str]:
    return [address for address in addresses if not is_loopback(address)]


def _register(**where: str) -> None:
    """Replace JAX's CPU backend by one whose Gloo listens there. JAX passes neither argument."""

    def make_client():
        client = DISTRIBUTED.load().global_state.client
        gloo = GLOO.load().make_gloo_tcp_collectives(distributed_client=client, **where)
        return CPU_CLIENT.load().make_cpu_client(gloo)

    backend.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
