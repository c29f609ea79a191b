"""Handle SIGTERM, SIGHUP and Ctrl-C as requests to save and stop."""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO


class StopRequest:
    """Set by SIGTERM, SIGHUP or Ctrl-C, so that the loop can save and stop.

    A second SIGTERM or Ctrl-C ends the process at once. A second SIGHUP does nothing: when a
    terminal closes, the kernel and the shell may each send one. If SIGHUP is ignored at the start,
    as by nohup, it stays ignored.

    Use as a context manager, which restores the earlier handlers at its end. Python delivers
    signals only to the main thread, so in other threads (a notebook's worker) no handler is set.

    In a run of several processes, JAX handles SIGTERM: it notifies all processes, and they agree on
    the step after the latest that any process has reached. A Python handler would replace this.
    Ctrl-C and SIGHUP send a SIGTERM, and only a second Ctrl-C ends at once.
    """

    def __init__(self, several: bool = False):
        """Args:     several: there are other processes, and they are connected."""
        self.received: str | None = None
        self._several, self._agreed = several, False
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in heeded():
                if not (self._several and number == signal.SIGTERM):
                    self._earlier[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def due(self) -> bool:
        """Return whether to save and stop now: the same in every process, and true from then on.

        In a run of several processes, call it after every step.
        """
        if not self._several:
            return self.received is not None
        # Imported here, since programs that do not start JAX import this module.
        from jaxpar.runtime.processes import peers

        if not self._agreed and peers.agreed_to_stop():
            self._agreed, self.received = True, self.received or "SIGTERM"
        return self._agreed

    def request(self, reason: str) -> None:
        """Ask the run to save and stop, as a signal does.

        Args:     reason: for the log, in place of a signal's name.
        """
        self.received = self.received or reason
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX notifies the other processes

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        hung_up = number == signal.SIGHUP
        signal.signal(number, signal.SIG_IGN if hung_up else signal.SIG_DFL)
        tolerate_lost_readers()
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)


def heeded() -> list[signal.Signals]:
    """Return the signals that stop a program: SIGTERM, Ctrl-C, and SIGHUP unless it is ignored."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if nohup else [signal.SIGHUP])]


@contextlib.contextmanager
def output_may_be_lost() -> Iterator[None]:
    """Ignore errors of standard output and error whose reader is gone, so that a run can save.

    The reader is a terminal that was closed; or, after a request to stop, another program, which
    the same signal may have ended. What is printed then goes nowhere.

    Contexts may overlap, in one thread or in several: the last one to end restores the streams.
    """
    used: list[_Lenient] = []
    with _SWITCHING:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            lenient = stream if isinstance(stream, _Lenient) else _Lenient(stream)
            lenient.users += 1
            setattr(sys, name, lenient)
            used.append(lenient)
    try:
        yield
    finally:
        with _SWITCHING:
            for name, lenient in zip(("stdout", "stderr"), used, strict=True):
                lenient.users -= 1
                if not lenient.users and getattr(sys, name) is lenient:
                    setattr(sys, name, lenient.wrapped)


#: Held while standard streams are replaced.
_SWITCHING = threading.Lock()


def tolerate_lost_readers() -> None:
    """Ignore the loss of other readers than terminals, too, from now on."""
    for stream in (sys.stdout, sys.stderr):
        # While a progress bar is shown, rich has put its own stream before it.
        lenient = getattr(stream, "rich_proxied_file", stream)
        if isinstance(lenient, _Lenient):
            lenient.stopping = lenient.unescaped.stopping = True


class _Lenient:
    """A text stream that ignores that its reader is gone."""

    def __init__(self, stream: TextIO):
        self.wrapped, self.stopping = stream, False
        #: The number of contexts that need it.
        self.users = 0
        # What `terminal.console` draws on; without it, the stream itself.
        inner = getattr(stream, "unescaped", None)
        self.unescaped: _Lenient
        if inner is None:
            self.unescaped = self
        else:
            self.unescaped = inner if isinstance(inner, _Lenient) else _Lenient(inner)

    def write(self, text: str) -> int:
        with self._without_reader():
            self.wrapped.write(text)
        return len(text)

    def flush(self) -> None:
        with self._without_reader():
            self.wrapped.flush()

    @contextlib.contextmanager
    def _without_reader(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO and not (self.stopping and error.errno == errno.EPIPE):
                raise
            # The stream keeps what it could not write, and would fail again.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.wrapped.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
