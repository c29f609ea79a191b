"""Fixtures that are shared with the tests of the profiler."""

from tests.tools.profiling.conftest import real_hlo, real_trace

__all__ = ["real_hlo", "real_trace"]
