"""Addresses of hosts, ports, and host:port as text."""

import errno
import ipaddress
import re
import socket

from jaxpar.config.numerals import only_digits


def split(address: str) -> tuple[str, int] | None:
    """Return host and port of "host:port", without the brackets of IPv6; None if it is none."""
    host, _, port = address.rpartition(":")
    bare = ":" in host and not re.fullmatch(r"\[[^\[\]]+\]", host)
    number = int(port.lstrip("0")[:6] or 0) if only_digits(port) else 0
    return (host.strip("[]"), number) if host and not bare and 0 < number < 1 << 16 else None


def joined(host: str, port: object) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def address_towards(host: str) -> str | None:
    """Return this host's address on the route to another; None without a route. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_here(address: str) -> bool:
    """Return whether an address is one of this host, on which it can listen."""
    return bind_error(address, 0) == 0


def bind_error(address: str, port: int) -> int:
    """Try to bind an address, and return the number of the error; 0 if it worked.

    It works beside a `FreePort`, as gRPC does.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind((address, port))
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return 0


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is that of the local host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] == "localhost"


def resolved(host: str | None, flags: int = 0) -> list[str]:
    """Return the addresses of a name, each once; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class FreePort:
    """A free port of an address, held until the end of the block without listening.

    gRPC can listen on it meanwhile, since it also sets SO_REUSEPORT.
    """

    def __init__(self, address: str):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._held = socket.socket(family, socket.SOCK_STREAM)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind((address, 0))
        self.number = int(self._held.getsockname()[1])

    def close(self) -> None:
        """Let others have it."""
        self._held.close()
