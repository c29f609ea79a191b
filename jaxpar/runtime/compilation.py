"""Notices whether programs were compiled, or read from JAX's compilation cache."""

import functools
import threading
from typing import Any

import jax

HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"

_here = threading.local()


class CacheReads:
    """Counts the programs that this thread reads from the compilation cache, within a block.

    with CacheReads() as reads:
        program = lowered.compile()
    if reads.hits: ...
    """

    def __init__(self) -> None:
        self.hits, self.misses = 0, 0

    def __enter__(self) -> "CacheReads":
        _listen()
        self._outer = getattr(_here, "reads", None)
        _here.reads = self
        return self

    def __exit__(self, *_: Any) -> None:
        _here.reads = self._outer


@functools.cache
def _listen() -> None:
    """Listen to JAX's events, once: JAX cannot remove a listener."""
    jax.monitoring.register_event_listener(_event)


def _event(event: str, **_: Any) -> None:
    reads = getattr(_here, "reads", None)
    if reads is not None:
        reads.hits += event == HIT
        reads.misses += event == MISS
