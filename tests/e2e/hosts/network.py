"""Hosts of their own on one machine: network namespaces with addresses, names and links.

A host has its own interfaces, its own name and its own /etc/hosts, on a network that no other host
reaches. Its link may be cut, slowed or delayed, and may lose packets. This needs root and iproute2
on Linux.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

#: Where `ip netns exec` looks for a namespace's files in /etc.
OWN_FILES = Path("/etc/netns")

#: The program that delays packets.
DELAY_LINE = Path(__file__).with_name("delay_line.py")


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
              congestion: TCP's way to find a rate, such as "reno". None: this machine's.
    """

    def __init__(self, count: int, own_names: str = "127.0.1.1", congestion: str | None = None):
        self.id, self.own_names, self.congestion = f"{os.getpid()}", own_names, congestion
        self.names = [f"jp{self.id}{'abcdefgh'[i]}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self.delay_lines: dict[int, subprocess.Popen[str]] = {}

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
            if self.congestion:
                write = f"echo {self.congestion} > /proc/sys/net/ipv4/tcp_congestion_control"
                _ip("netns", "exec", name, "sh", "-c", write)
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self.delay_lines):
            self._end_delay(host)
        for host, name in enumerate(self.names):
            _ip("link", "del", self._port(host), check=False)  # at once, unlike with its namespace
            _ip("netns", "del", name, check=False)
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

    def lose(self, host: int, share: float, port: int | None = None) -> None:
        """Lose a share of a host's packets at random, in each direction; 0 loses none.

        Call it before the hosts' programs start: connections keep the size of their packets.

        Args:     port: of TCP, to lose only its packets. None: all packets.
        """
        for name in self.names:  # otherwise what is lost at once is up to 64 KB of a connection
            _ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")
        link = ["dev", self._port(host)]
        _run(["tc", "qdisc", "replace", *link, "clsact"])
        for direction in "ingress", "egress":
            _run(["tc", "filter", "del", *link, direction], check=False)
            if share:
                code = ["bpf", "direct-action", "bytecode", _losing(share, port)]
                _run(["tc", "filter", "add", *link, direction, "protocol", "all", *code])

    def delay(self, host: int, seconds: float) -> None:
        """Let each packet to or from a host take so much longer; 0 ends it."""
        self._end_delay(host)
        if not seconds:
            return
        inner, ends = f"jp{self.id}d{host}", [f"jp{self.id}{end}{host}" for end in "xy"]
        command = [sys.executable, str(DELAY_LINE), *ends, str(seconds)]
        pipe = subprocess.PIPE
        line = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.delay_lines[host] = line
        if line.stdout is None or line.stdout.readline() != "ready\n":
            raise RuntimeError(f"no delay line: {' '.join(command)}")
        _ip("link", "add", inner, "type", "bridge")
        for link, bridge in {ends[0]: inner, ends[1]: self._bridge}.items():
            _ip("link", "set", link, "master", bridge, "up")
        _ip("link", "set", inner, "up")
        _ip("link", "set", self._port(host), "master", inner)

    def _end_delay(self, host: int) -> None:
        if host in self.delay_lines:
            self.delay_lines.pop(host).communicate()  # and with it its interfaces end
            _ip("link", "set", self._port(host), "master", self._bridge)
            _ip("link", "del", f"jp{self.id}d{host}")

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


def _losing(share: float, port: int | None) -> str:
    """Return a program of classic BPF that loses packets, as `tc` reads it.

    Each instruction is a code, the instructions to skip if a comparison holds and if not, and a
    number. The programs end with TC_ACT_UNSPEC, which lets a packet pass, or TC_ACT_SHOT.
    """
    word, half, byte, equal, at_least, end = 0x20, 0x28, 0x30, 0x15, 0x35, 0x06
    passes, lost, random = 0xFFFFFFFF, 2, 0xFFFFF038  # SKF_AD_OFF + SKF_AD_RANDOM
    program = []
    if port is not None:  # IPv4, whose header has no options, and TCP, to the port or from it
        program += [(half, 0, 0, 12), (equal, 0, 8, 0x0800), (byte, 0, 0, 23), (equal, 0, 6, 6)]
        program += [(half, 0, 0, 34), (equal, 2, 0, port), (half, 0, 0, 36), (equal, 0, 2, port)]
    program += [(word, 0, 0, random), (at_least, 0, 1, min(round(share * 2**32), 2**32 - 1))]
    program += [(end, 0, 0, passes), (end, 0, 0, lost)]
    return ",".join([str(len(program)), *(" ".join(map(str, line)) for line in program)])


def _ip(*words: str, check: bool = True) -> int:
    return _run(["ip", *words], check)


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _run(command: list[str], check: bool = True) -> int:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.returncode
