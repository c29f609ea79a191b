"""Shows the current operation, and ends the program if a section hangs."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import peers

type Tell = Callable[[str], None]


def no_report(text: str) -> None:
    """Report nothing."""


class SectionProgress:
    """A status line for the current operation, and a time limit for each section."""

    def __init__(self, console: Console, seconds: float):
        """Args:     seconds: time limit; a section that takes longer counts as hung."""
        self.console, self.limit = console, seconds
        self.seconds: dict[str, float] = {}
        self.at = ""
        self._show: Tell = no_report

    def tell(self, text: str) -> None:
        """Report that an operation begins."""
        self.at = text
        self._show(text)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a section. If it exceeds the limit, the program exits with code 124."""
        self.at, began = name, time.monotonic()
        timer = threading.Timer(self.limit, self._hung, (name,))
        timer.daemon = True
        timer.start()
        try:
            if self.console.is_terminal:
                with self.console.status(name) as status:
                    self._show = lambda text: status.update(f"{name}: {text}")
                    yield
            else:
                yield
        finally:
            timer.cancel()
            self._show = no_report
            self.seconds[name] = round(time.monotonic() - began, 2)

    def _hung(self, name: str) -> None:
        """Report the operation and exit: a hanging collective can be ended in no other way."""
        who = peers.process_name(peers.rank())
        remedy = "a collective may hang: check the links, set NCCL_DEBUG=INFO, or raise --seconds"
        text = f"error: {name}: {who} did not finish in {self.limit:g} s, at: {self.at}; {remedy}"
        print(text, file=sys.stderr, flush=True)
        os._exit(exit_codes.EXIT_HANG)
