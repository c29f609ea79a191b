"""Says what a section does if it takes long, and ends the program if it hangs."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import peers
from jaxpar.runtime.stages import Stage, stage

type Tell = Callable[[str], None]


def no_report(text: str) -> None:
    """Report nothing."""


class SectionProgress:
    """The current operation, and a time limit for each section."""

    def __init__(self, seconds: float):
        """Args:     seconds: time limit; a section that takes longer counts as hung."""
        self.limit = seconds
        self.seconds: dict[str, float] = {}
        self.at = ""
        self._stage: Stage | None = None

    def tell(self, text: str) -> None:
        """Report that an operation begins."""
        self.at = text
        if self._stage is not None:
            self._stage.at(text)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a section. If it exceeds the limit, the program exits with code 124."""
        self.at, began = name, time.monotonic()
        timer = threading.Timer(self.limit, self._hung, (name,))
        timer.daemon = True
        timer.start()
        try:
            with stage(name) as self._stage:
                yield
        finally:
            timer.cancel()
            self.seconds[name] = round(time.monotonic() - began, 2)

    def _hung(self, name: str) -> None:
        """Report the operation and exit: a hanging collective can be ended in no other way."""
        who = peers.process_name(peers.rank())
        remedy = "a collective may hang: check the links, set NCCL_DEBUG=INFO, or raise --seconds"
        text = f"error: {name}: {who} did not finish in {self.limit:g} s, at: {self.at}; {remedy}"
        print(text, file=sys.stderr, flush=True)
        os._exit(exit_codes.EXIT_HANG)
