"""What the program is at: shown while it works, and said when it does not come to an end."""

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
    """A line about the work in hand, and a limit on how long a section may take."""

    def __init__(self, console: Console, seconds: float):
        """Args:     seconds: after which a section counts as hung."""
        self.console, self.limit = console, seconds
        self.seconds: dict[str, float] = {}
        self.at = ""
        self._show: Tell = no_report

    def tell(self, text: str) -> None:
        """A new piece of work begins."""
        self.at = text
        self._show(text)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A section at work. One that does not end in time ends the program, with code 124."""
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
        """Say where, and end: what waits inside a collective can be ended in no other way."""
        who = peers.process_name(peers.rank())
        remedy = "a collective that hangs: look at links, and NCCL_DEBUG=INFO; or give it --seconds"
        text = f"error: {name}: {who} is not done after {self.limit:g} s, at: {self.at}; {remedy}"
        print(text, file=sys.stderr, flush=True)
        os._exit(exit_codes.EXIT_HANG)
