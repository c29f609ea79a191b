"""Takes a trace with JAX's profiler."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax


@contextlib.contextmanager
def capture(folder: str | Path) -> Iterator[None]:
    """Trace the code in this context to a folder, without Python calls."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tens of thousands of events, which slow the host
    with jax.profiler.trace(folder, profiler_options=options):
        yield
