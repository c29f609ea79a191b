"""Handle SIGTERM and Ctrl-C as requests to save and stop."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Set by SIGTERM or Ctrl-C, so that the loop can save and stop. A second signal ends at once.

    Use as a context manager, which restores the earlier handlers at its end. Python delivers
    signals only to the main thread, so in other threads (a notebook's worker) no handler is set.

    In a run of several processes, JAX handles SIGTERM: it notifies all processes, and they agree on
    the step after the latest that any process has reached. A Python handler would replace this.
    Ctrl-C sends a SIGTERM, and only a second Ctrl-C ends at once.
    """

    def __init__(self, several: bool = False):
        """Args:     several: there are other processes, and they are connected."""
        self.received: str | None = None
        self._several, self._agreed = several, False
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._several else (signal.SIGTERM, signal.SIGINT):
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

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
