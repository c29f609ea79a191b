"""SIGTERM and Ctrl-C, as a request to save and leave."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Set by SIGTERM or Ctrl-C, so that the loop can save and leave. A second one ends at once.

    Use as a context manager: leaving it puts the earlier handlers back. Python delivers signals to
    the main thread alone, so elsewhere (a notebook's worker) it listens to nothing.

    With several processes, SIGTERM is JAX's: it listens since the processes have met, passes word
    on to all of them, and they agree on the step after the furthest that any has reached. A handler
    of Python's would take that away. Ctrl-C becomes a SIGTERM, and only its second ends at once.
    """

    def __init__(self, several: bool = False):
        """Args:     several: there are other processes, and they have met."""
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
        """Whether to save and leave now: the same in every process, and true from then on.

        With several of them, it must be asked after each step.
        """
        if not self._several:
            return self.received is not None
        # Here, since programs that start no JAX read this file.
        from jaxpar.runtime.processes import peers

        if not self._agreed and peers.agreed_to_stop():
            self._agreed, self.received = True, self.received or "SIGTERM"
        return self._agreed

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
