"""The compilers of elementwise kernels, for tests on a GPU."""

import jax
import pytest

from jaxpar.kernels.compiler import MOSAIC_CAPABILITY


@pytest.fixture(params=["triton", "mosaic"])
def compiler(request) -> str:
    """A compiler of Pallas: Mosaic GPU's kernels are for GPUs since Hopper."""
    if request.param == "mosaic":
        capability = float(jax.devices()[0].compute_capability)
        if capability < MOSAIC_CAPABILITY:
            pytest.skip(f"compute capability {capability}")
    return request.param
