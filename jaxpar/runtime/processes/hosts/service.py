"""A coordination service of JAX in a process of its own, so that no training process hosts it.

    python -m jaxpar.runtime.processes.hosts.service ADDRESS:PORT NODES

Two uses: the store of the launchers (0 nodes), and the coordinator of one generation of training
processes (as many nodes as processes). It imports jaxlib alone, which takes a third of a second.

JAX's service is made for a known number of processes, which all register at the start. The store
is therefore a service of a single node, and every launcher's client registers as that node; the
service is recoverable, so that a node may register again. Reading and writing keys needs no more
than a registration. Heartbeats are turned off: launchers have their own (`membership.py`), because
JAX's end the process of a client that loses its link.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence

#: Seconds without a heartbeat after which JAX would end the processes: never. The launchers watch.
NO_HEARTBEAT = 10**6

#: Seconds without a heartbeat after which JAX ends a training process: as `rendezvous.py`.
TRAINING_HEARTBEAT = 100

#: The exit code if another program, or another service, has the port.
PORT_TAKEN = 3


def main(argv: Sequence[str]) -> int:
    """Serve until standard input closes, which the launcher holds open."""
    address, nodes = argv[0], int(argv[1])
    port = int(address.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_only_one(port))
        except OSError:
            return PORT_TAKEN
        from jaxpar.jax_private.table import SERVICE
        from jaxpar.runtime.processes import mtls

        try:
            service = SERVICE.load().get_distributed_runtime_service(
                address,
                max(nodes, 1),
                heartbeat_timeout=TRAINING_HEARTBEAT if nodes else NO_HEARTBEAT,
                shutdown_timeout=30,
                recoverable=not nodes,
                # Launchers sign what they write in their store, and have no certificates.
                **(mtls.arguments() if nodes else {}),
            )
        except RuntimeError as error:
            print(f"error: {address}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
            return PORT_TAKEN
        print("serving", flush=True)
        _wait_for_the_launcher()
        del service
    os._exit(0)  # its clients may be gone already


@contextlib.contextmanager
def _only_one(port: int) -> Iterator[None]:
    """Hold a port of this host against other services: gRPC would share it with them.

    The name of an abstract socket goes with its process, and each network namespace has its own.
    """
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(f"\0jaxpar-coordination-{port}")
        yield


def _wait_for_the_launcher() -> None:
    while sys.stdin.buffer.read(1 << 16):
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
