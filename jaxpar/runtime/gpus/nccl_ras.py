"""Query NCCL's RAS service about a job that hangs.

Since version 2.24, NCCL has a thread in each process that knows all communicators of the job and
how many collectives each rank has started on each of them. It listens on NCCL_RAS_ADDR, by default
localhost:28028, and answers in lines of text:

    > CLIENT PROTOCOL 2          < SERVER PROTOCOL 2
    > TIMEOUT 5                  < OK
    > VERBOSE STATUS             < the report, to the end of the connection

Source: NCCL's user guide, troubleshooting/ras, and its client, src/ras/client.cc.
"""

import os
import socket
import time

#: Address of the service if NCCL_RAS_ADDR is not set.
DEFAULT_ADDRESS = "localhost:28028"

#: Version of the protocol. Servers with another version also answer.
PROTOCOL = 2

#: Sections of the report that describe problems.
SECTIONS = ("Errors", "Warnings")

#: Maximum bytes of a report; those of thousands of ranks are truncated.
MAX_REPLY_BYTES = 4 << 20


class NoAnswer(Exception):
    """The service does not answer: it is disabled, NCCL is too old, or NCCL has not started."""


def status(seconds: float, address: str | None = None) -> str:
    """Return the report on all communicators of this process's job.

    Args:     seconds: total time to wait; NCCL waits one second less for its other processes.
              address: host:port; None: NCCL_RAS_ADDR, or the default.
    Raises:   NoAnswer if there is no report by then.
    """
    address = address or os.environ.get("NCCL_RAS_ADDR") or DEFAULT_ADDRESS
    host, _, port = address.rpartition(":")
    until = time.monotonic() + seconds
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as link:
            _ask(link, f"CLIENT PROTOCOL {PROTOCOL}", "SERVER PROTOCOL", until)
            _ask(link, f"TIMEOUT {max(int(seconds) - 1, 1)}", "OK", until)
            link.sendall(b"VERBOSE STATUS\n")
            return _read(link, until, to_the_end=True)
    except (OSError, ValueError) as error:
        raise NoAnswer(
            f"NCCL's RAS service at {address}: {error or type(error).__name__}"
        ) from None


def _ask(link: socket.socket, line: str, expected: str, until: float) -> None:
    """Send a line and check the start of the answer."""
    link.sendall(f"{line}\n".encode())
    answer = _read(link, until)
    if not answer.upper().startswith(expected):
        raise OSError(f"answered {line!r} with {answer.strip()[:80]!r}")


def _read(link: socket.socket, until: float, *, to_the_end: bool = False) -> str:
    """Read a line, or everything until the end of the connection or of the time."""
    found = b""
    while len(found) < MAX_REPLY_BYTES and (to_the_end or not found.endswith(b"\n")):
        link.settimeout(max(until - time.monotonic(), 0.01))
        try:
            more = link.recv(65536)
        except TimeoutError:
            if to_the_end and found:
                return found.decode("utf-8", "replace") + "\n[truncated: timed out]\n"
            raise
        if not more:
            break
        found += more
    if not found:
        raise OSError("closed the connection")
    return found.decode("utf-8", "replace")


def what_is_wrong(report: str) -> list[str]:
    """Return the lines of a report's errors and warnings: ranks that are behind or dead."""
    found, within = [], False
    lines = report.splitlines()
    for line, below in zip(lines, [*lines, ""][1:], strict=True):
        if below and set(below) == {"="}:  # a heading
            within = line.strip() in SECTIONS
        elif within and line.strip() and set(line) != {"="}:
            found.append(line.rstrip())
    return found
