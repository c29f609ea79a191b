"""The piece of a real trace that tests of profiling have."""

from tests.profiling.conftest import real_hlo, real_trace

__all__ = ["real_hlo", "real_trace"]
