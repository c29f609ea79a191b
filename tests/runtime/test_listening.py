"""The coordinator listens on the address that the run names, and on no other."""

import socket
import subprocess
import sys

import pytest

from jaxpar.runtime.processes import connecting
from jaxpar.runtime.processes.connecting import (
    BIND_ADDRESS,
    PortTaken,
    bind_address,
    check_free,
    warn_if_open,
)
from jaxpar.runtime.processes.sources import ProcessPlace
from tests import ranks


def place(coordinator: str, num_hosts: int | None = 2) -> ProcessPlace:
    return ProcessPlace(
        source="flags",
        coordinator=coordinator,
        num_processes=2,
        process_id=0,
        num_hosts=num_hosts,
    )


@pytest.fixture
def host_has(monkeypatch):
    """(names, own) -> the addresses of names, and those of this host."""

    def has(names: dict[str, list[str]], own: set[str]) -> None:
        monkeypatch.delenv(BIND_ADDRESS, raising=False)
        monkeypatch.setattr(connecting, "resolved", lambda host, flags=0: names.get(host, []))
        monkeypatch.setattr(connecting, "is_here", lambda address: address in own)

    return has


NAMES = {
    "gpu1": ["10.0.0.1"],
    "gpu1-both": ["10.0.0.1", "fd00::1"],
    "gpu1-v6": ["10.9.9.9", "fd00::1"],
    "gpu1-local": ["127.0.1.1"],
    "service": ["10.96.0.7"],
}
OWN = {"127.0.0.1", "127.0.1.1", "10.0.0.1", "fd00::1"}


@pytest.mark.parametrize(
    ("coordinator", "num_hosts", "bound"),
    [
        ("127.0.0.1:1234", 1, "127.0.0.1:1234"),
        ("localhost:1234", None, "localhost:1234"),
        ("gpu1:1234", 2, "gpu1:1234"),
        ("gpu1:1234", None, "gpu1:1234"),
        ("gpu1-both:1234", 2, "gpu1-both:1234"),
        ("gpu1-v6:1234", 2, "[fd00::1]:1234"),
        ("gpu1-local:1234", 1, "gpu1-local:1234"),
    ],
)
def test_it_listens_on_the_address_that_is_given(host_has, capsys, coordinator, num_hosts, bound):
    host_has(NAMES, OWN)
    assert bind_address(place(coordinator, num_hosts)) == bound
    warn_if_open(place(coordinator, num_hosts), bound)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("host", ["gpu1-local", "service", "unknown"])
def test_a_name_of_no_address_of_this_host_is_warned_about(host_has, capsys, host):
    host_has(NAMES, OWN)
    there = place(f"{host}:1234")
    assert bind_address(there) is None
    warn_if_open(there, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING    the coordinator listens on every network of ")
    assert f"{host} is none of its addresses" in line


def test_the_variable_of_jax_is_used(monkeypatch):
    monkeypatch.setenv(BIND_ADDRESS, "10.1.1.1:99")
    assert bind_address(place("gpu1:1234")) == "10.1.1.1:99"


def test_only_the_bound_address_must_be_free():
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        check_free(place(f"127.0.0.1:{port}"), f"127.0.0.1:{port}")
        with pytest.raises(PortTaken, match=f"uses port {port}"):
            check_free(place(f"127.0.0.2:{port}"), f"127.0.0.2:{port}")


def own_address() -> str:
    """An address of this host that is not a loopback address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            found = probe.getsockname()[0]
        except OSError:
            return ""
    return "" if found.startswith("127.") else found


#: The coordinator of two processes, whose second never comes.
COORDINATOR = """
import sys, threading, time
from jaxpar.runtime.processes import connecting
from jaxpar.runtime.processes.sources import ProcessPlace
place = ProcessPlace(source="flags", coordinator=sys.argv[1], num_processes=2, process_id=0)
connecting.connect(place, 60)
"""


@pytest.mark.waits
@pytest.mark.skipif(not own_address(), reason="this host has only loopback addresses")
def test_nothing_listens_on_the_other_addresses():
    port = ranks.free_port()
    command = [sys.executable, "-c", COORDINATOR, f"{own_address()}:{port}"]
    started = subprocess.Popen(command, env=ranks.environment())
    try:
        for _ in range(300):
            assert started.poll() is None
            try:
                socket.create_connection((own_address(), port), 1).close()
                break
            except OSError:
                with pytest.raises(subprocess.TimeoutExpired):
                    started.wait(0.2)
        else:
            pytest.fail("the coordinator does not listen on its address")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
    finally:
        started.kill()
        started.wait()
