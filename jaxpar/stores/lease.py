"""The lock of a run in a store: an object that names who writes the run, renewed while it does.

The object is created if absent, and changed only if nobody else has changed it, by conditional
writes. Its holder renews it every RENEW_SECONDS. A lease that one who waits has not seen renewed
for LEASE_SECONDS has expired and may be taken.

No time of day is read, and no clocks are compared: who waits counts its own seconds between two
looks at the object's version, and the holder counts its own since it sent the last renewal.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import read_json
from jaxpar.runtime.files.lock import RunLocked
from jaxpar.stores.objects import Conflict, Missing, Objects, Stamp, StoreError

#: The object's name.
NAME = "lock"

#: Seconds after which a lease that is not renewed may be taken, and between renewals.
LEASE_SECONDS, RENEW_SECONDS = 60.0, 15.0

#: Seconds to wait at the end for a renewal in progress.
CLOSE_SECONDS = 10.0

#: Seconds between two looks at a lease of another run.
POLL_SECONDS = 2.0


class Lease:
    """A lease on a run. Use as a context manager, in process 0 only. `with` releases it."""

    def __init__(self, objects: Objects, report: Callable[[str], None], wait: bool = True):
        """Take the lease.

        Args:     report: called once if the lease must be waited for. wait: wait until a lease that
                  is not renewed has expired.
        Raises:   RunLocked that names the holder; ConfigError for a store that cannot be used;
                  StoreError.
        """
        self.session = secrets.token_hex(8)
        self._objects, self._report = objects, report
        self._lost, self._renewed = "", 0.0
        #: Whether the object is deleted at the end: of a run that has written nothing.
        self.leaves_nothing = False
        self._stamp, self._over = self._take(wait), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def _take(self, wait: bool) -> Stamp:
        first: tuple[Stamp, float] | None = None
        told, pause = False, threading.Event()
        while True:
            try:
                content, stamp = self._objects.read(NAME)
            except Missing:
                if (taken := self._written(None)) is not None:
                    return taken
                continue
            about, now = _parsed(content), time.monotonic()
            first = first or (stamp, now)
            if _has_ended(about) or (stamp == first[0] and now - first[1] >= LEASE_SECONDS):
                if (taken := self._written(stamp)) is not None:
                    return taken
                first = None  # another one was faster
                continue
            holder = f"{self._objects.address} is being written by {_holder(about)}"
            if not wait or stamp != first[0]:  # renewed meanwhile, so its holder lives
                raise RunLocked(f"{holder}. Fix: stop that run, or use another address")
            if not told:
                self._report(f"waiting    {holder}; for {LEASE_SECONDS:.0f} s, unless it lives")
                told = True
            pause.wait(POLL_SECONDS)

    def _written(self, stamp: Stamp | None, released: bool = False) -> Stamp | None:
        """Write the lease over the given version. Returns:  its version; None for a conflict."""
        content = json.dumps(self._about(released)).encode() + b"\n"
        sent = _seconds()  # what was sent may arrive long before it is answered
        try:
            written = self._objects.write_if(NAME, content, stamp)
        except Conflict:
            written = None
            with contextlib.suppress(Missing):  # the answer of a request that won may be lost
                there, now = self._objects.read(NAME)
                if _parsed(there).get("session") == self.session:
                    written = now
        if written is not None:
            self._renewed = sent
        return written

    def _about(self, released: bool) -> dict[str, Any]:
        return {
            "session": self.session,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "space": _process_space(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "released": released,
        }

    def _renew(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            try:
                stamp = self._written(self._stamp)
            except (StoreError, ConfigError, OSError):
                continue  # tried again; `is_held` says meanwhile whether it may have expired
            if stamp is None:
                self._lost = "another run has taken it"
                return
            self._stamp = stamp

    def is_held(self) -> bool:
        """Whether the lease surely is this run's: renewed lately, and not taken."""
        return not self._lost and _seconds() - self._renewed < LEASE_SECONDS

    def check(self) -> None:
        """Raises:   RunLocked if another run has taken the lease."""
        if self._lost:
            where = self._objects.address
            why = f"the lease on {where} expired, and {self._lost}"
            raise RunLocked(f"{why}. This run stops, so that only one writes")

    def release(self) -> None:
        """Release the lease, unless another run has taken it. Later calls do nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(CLOSE_SECONDS)
        if not self._lost:
            with contextlib.suppress(StoreError, ConfigError, Conflict):  # it expires by itself
                if self.leaves_nothing and self.is_held():
                    return self._objects.delete([NAME])
                self._written(self._stamp, released=True)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _seconds() -> float:
    """Return the seconds of a clock that never jumps, and runs while a machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        about = read_json(content)
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def _has_ended(about: dict[str, Any]) -> bool:
    """Whether the holder has released the lease, or has died on this host."""
    if about.get("released"):
        return True
    if about.get("space") != _process_space():
        return False
    return not Path(f"/proc/{about.get('pid')}").exists()


def _process_space() -> str:
    """Name the boot of this kernel and the namespace in which process ids are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # equal to none


def _holder(about: dict[str, Any]) -> str:
    known = f"process {about.get('pid')} on {about.get('host')}, renewed {about.get('time')}"
    return known if "pid" in about else "another process, which has not recorded its id"
