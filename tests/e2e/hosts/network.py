"""Hosts of their own on one machine: network namespaces with addresses, names and links.

A host has its own interfaces, its own name and its own /etc/hosts, on a network that no other host
reaches. Its link may be cut or slowed. This needs root and iproute2 on Linux.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

#: Where `ip netns exec` looks for a namespace's files in /etc.
OWN_FILES = Path("/etc/netns")


def require_namespaces() -> None:
    """Skip a test where namespaces cannot be made."""
    import pytest  # measurements, which make namespaces, do not need it

    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip and unshare")
    name = f"jp{os.getpid()}"
    if _ip("netns", "add", name, check=False):
        pytest.skip("this system makes no network namespaces")
    _ip("netns", "del", name)


class Network:
    """So many hosts on one network; they are gone at the end of the `with` block.

    Args:     own_names: what a host's own name is in its /etc/hosts. Debian has 127.0.1.1 there.
    """

    def __init__(self, count: int, own_names: str = "127.0.1.1"):
        self.id, self.own_names = f"{os.getpid()}", own_names
        self.names = [f"jp{self.id}{'abcdefgh'[i]}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]

    def __enter__(self) -> Self:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            self._write_hosts(i)
            _ip("netns", "add", name)
            _ip("link", "add", self._port(i), "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", self._port(i), "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in "eth0", "lo":
                _ip("-n", name, "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            _ip("netns", "del", name, check=False)  # and with it its link
            shutil.rmtree(OWN_FILES / name, ignore_errors=True)
        _ip("link", "del", self._bridge, check=False)

    def launch_options(self, host: int) -> list[str]:
        """The options of a host's launcher that no other has: none, as its host name is its own."""
        return []

    def start(self, host: int, command: list[str], env: dict[str, str], out: Any) -> Any:
        """Start a program on a host. Its host name is the namespace's.

        Args:     out: an open file for what it prints.
        """
        name = self.names[host]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
        return subprocess.Popen(
            ["ip", "netns", "exec", name, *named, *command],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self, host: int) -> None:
        """Kill every process on a host at once, as when its power fails."""
        name = self.names[host]
        while pids := _said(["ip", "netns", "pids", name]).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)

    def cut(self, host: int) -> None:
        """Take a host's link down: packets are lost, and no connection is closed."""
        _ip("link", "set", self._port(host), "down")

    def heal(self, host: int) -> None:
        """Bring the link up again."""
        _ip("link", "set", self._port(host), "up")

    def limit(self, host: int, rate: str) -> None:
        """Limit what a host receives, such as to "20mbit"."""
        shape = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        _run(["tc", "qdisc", "replace", "dev", self._port(host), *shape])

    @property
    def _bridge(self) -> str:
        return f"jp{self.id}br"

    def _port(self, host: int) -> str:
        return f"jp{self.id}p{host}"

    def _write_hosts(self, host: int) -> None:
        """Each host knows the others by address, and itself by `own_names`."""
        lines = ["127.0.0.1 localhost"]
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            lines.append(f"{self.own_names if i == host and self.own_names else address} {name}")
        folder = OWN_FILES / self.names[host]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n")


def _ip(*words: str, check: bool = True) -> int:
    return _run(["ip", *words], check)


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _run(command: list[str], check: bool = True) -> int:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.returncode
