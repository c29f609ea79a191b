"""The hosts' network itself: a link loses and delays what it is told to."""

import os
import statistics
import subprocess
import sys

import pytest

from tests.e2e.hosts.network import Network, require_namespaces

pytestmark = pytest.mark.waits

#: Datagrams from host 1 to host 0. The receiver prints the seconds that each took.
RECEIVE = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("10.77.0.1", 7000))
s.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE: room for all, on a busy host
print("ready", flush=True)
s.settimeout(20)
while (sent := float(s.recv(100))) >= 0:
    print(time.monotonic() - sent, flush=True)
"""
SEND = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(500):
    s.sendto(str(time.monotonic()).encode(), ("10.77.0.1", 7000))
    time.sleep(0.001)
time.sleep(0.3)
for _ in range(30):
    s.sendto(b"-1", ("10.77.0.1", 7000))
"""

#: Whether host 1 reaches two ports of host 0.
LISTEN = """
import socket, time
both = [socket.create_server(("10.77.0.1", port)) for port in (7001, 7002)]
print("ready", flush=True)
time.sleep(60)
"""
CONNECT = """
import socket
for port in 7001, 7002:
    try:
        socket.create_connection(("10.77.0.1", port), 1).close()
        print(port, "answers")
    except TimeoutError:
        print(port, "is silent")
"""


def said(network: Network, server: str, client: str) -> tuple[list[str], list[str]]:
    """What a program on host 0, and one on host 1 that starts once it is ready, print."""
    start = lambda host, code: network.start(  # noqa: E731
        host, [sys.executable, "-c", code], dict(os.environ), subprocess.PIPE
    )
    first = start(0, server)
    try:
        assert first.stdout.readline() == "ready\n"
        of_client = start(1, client).communicate(timeout=600)[0]
        network.kill(1)
        if server is LISTEN:
            network.kill(0)
        of_server = first.communicate(timeout=600)[0]
    finally:
        network.kill(0)
    return of_server.split("\n")[:-1], of_client.split("\n")[:-1]


@pytest.mark.slow
def test_links_lose_and_delay_packets():
    require_namespaces()
    took = lambda: [float(x) for x in said(network, RECEIVE, SEND)[0]]  # noqa: E731
    with Network(2) as network:
        plain = took()
        assert len(plain) == 500
        network.lose(1, 0.3)
        # Five standard deviations of the binomial distribution.
        assert 350 - 51 < len(took()) < 350 + 51
        network.lose(1, 0.0)
        network.delay(1, 0.05)
        delayed = took()
        assert len(delayed) == 500 and min(delayed) >= 0.05
        network.delay(1, 0.0)
        assert len(took()) == 500
        network.lose(1, 1.0, port=7001)
        assert said(network, LISTEN, CONNECT)[1] == ["7001 is silent", "7002 answers"]
        assert statistics.median(took()) < 0.05
