"""A clock for a watchdog. Imports little: programs of tests start with it."""

import threading
import time

#: Seconds after which something will never happen, as `tests.ranks.HANG`.
HANG = 240.0


class Clock:
    """Stands for the module `time` in the watchdog's: no busy machine makes it go faster."""

    def __init__(self):
        self.now, self._looks = 0.0, threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(time, name)

    def monotonic(self) -> float:
        if threading.current_thread().name == "watchdog":
            self._looks.release()
        return self.now

    def advance(self, seconds: float) -> None:
        """Set the clock forward, and return once the watchdog has compared it with its limit."""
        self.now += seconds
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(2):  # it has compared the first as it takes the second
            assert self._looks.acquire(timeout=HANG)
