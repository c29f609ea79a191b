"""The time from the start of a run to the end of its first step, by phase."""

import os
import time

#: When the start-up began, by `time.perf_counter`, if it was not when this process started.
_began: float | None = None


class StartUp:
    """The phases of the start-up, in the order in which they ended.

    The first phase covers everything before: Python, imports, and JAX's devices.
    """

    def __init__(self) -> None:
        #: Whether the train step was read from the compilation cache.
        self.from_cache = False
        self.seconds: dict[str, float] = {"python and devices": process_age()}
        self._last = time.perf_counter()

    def ended(self, part: str) -> None:
        """Count the time since the end of the last phase as `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"first step done after {sum(self.seconds.values()):.1f} s: {parts}"


def begin_now() -> None:
    """Let the start-up begin now: for a run in a process that did something else before."""
    global _began
    _began = time.perf_counter()


def process_age() -> float:
    """Return the seconds since this process started, or since `begin_now` was called; 0 if the
    system does not report it."""
    if _began is not None:
        return time.perf_counter() - _began
    try:
        with open("/proc/self/stat") as file:
            started = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
