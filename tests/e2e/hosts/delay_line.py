"""Carries packets between two network interfaces, each some time after it came.

    python tests/e2e/hosts/delay_line.py NAME NAME SECONDS

It makes both interfaces (TAP devices), says "ready", and runs until its standard input closes.
netem would do this in the kernel, but not every kernel has it. The kernel hands a TAP device
packets of the link's size, with their checksums.
"""

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

#: From linux/if_tun.h: make an interface; of whole Ethernet packets, and nothing before them.
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000

#: Bytes of the largest packet of a link of 1,500 bytes, and more.
LARGEST = 2048

#: Packets read before those that are due are looked at again.
AT_ONCE = 64


class Line:
    """One direction. Its queue is as long as the senders make it: TCP sends a window at a time."""

    def __init__(self, source: int, sink: int, seconds: float):
        self.source, self.sink, self.seconds = source, sink, seconds
        self.waiting: deque[tuple[float, bytes]] = deque()

    def read(self) -> None:
        """Take what has come."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                packet = os.read(self.source, LARGEST)
                self.waiting.append((time.monotonic() + self.seconds, packet))

    def write(self) -> None:
        """Pass on what is due. A packet for an interface that is down is lost."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):
                os.write(self.sink, self.waiting.popleft()[1])


def opened(name: str) -> int:
    """Make an interface. Returns:  the file that its packets come from and go to."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def main(first: str, second: str, seconds: str) -> None:
    """Carry packets both ways until standard input closes."""
    one, other = opened(first), opened(second)
    lines = [Line(one, other, float(seconds)), Line(other, one, float(seconds))]
    print("ready", flush=True)
    while True:
        due = [line.waiting[0][0] for line in lines if line.waiting]
        wait = max(min(due) - time.monotonic(), 0) if due else None
        readable = select.select([one, other, sys.stdin], [], [], wait)[0]
        if sys.stdin in readable:
            return
        for line in lines:
            if line.source in readable:
                line.read()
            line.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
