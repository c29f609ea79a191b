"""What tests on a GPU need of it."""

import pytest

from jaxpar.kernels.hopper import capability
from jaxpar.kernels.platform import Platform


@pytest.fixture
def elementwise_kernels():
    """Skip where XLA compiles the elementwise functions."""
    if not capability.runs_here():
        pytest.skip(f"compute capability {Platform.here().compute_capability}")
