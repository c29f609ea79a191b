"""What tests on a GPU need of it."""

import pytest

from jaxpar.kernels import platform
from jaxpar.kernels.platform import Platform


@pytest.fixture
def elementwise_kernels():
    """Skip where XLA compiles the elementwise functions."""
    if not platform.Platform.here().runs_elementwise_kernels:
        pytest.skip(f"compute capability {Platform.here().compute_capability}")
