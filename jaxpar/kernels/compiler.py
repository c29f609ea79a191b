"""The compiler of the elementwise kernels: Triton or Mosaic GPU, the two of Pallas, or XLA.

JAX deprecates Triton's. On GPUs since Hopper, kernels for Mosaic GPU can replace those for Triton
(`kernels/hopper`). `scripts/measure/elementwise_ports.py` compares them.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal

from jaxpar.kernels.platform import Platform

type Compiler = Literal["triton", "mosaic", "xla"]

#: The compiler of kernels that have both forms.
DEFAULT: Compiler = "triton"

#: The first compute capability of Mosaic GPU's kernels: that of Hopper, which has TMA.
MOSAIC_CAPABILITY = 9.0

_CHOSEN: contextvars.ContextVar[Compiler | None] = contextvars.ContextVar("compiler", default=None)


def compiler_of(kernel_capability: float) -> Compiler:
    """Return the compiler of an elementwise kernel on this platform.

    Args:     kernel_capability: the first compute capability on which the kernel for Triton runs.
    """
    here, chosen = Platform.here(), _CHOSEN.get() or DEFAULT
    if here.name != "gpu" or chosen == "xla":
        return "xla"
    capability = float(here.compute_capability)
    if chosen == "mosaic":
        return "mosaic" if capability >= MOSAIC_CAPABILITY else "xla"
    return "triton" if capability >= kernel_capability else "xla"


@contextlib.contextmanager
def compiled_by(compiler: Compiler) -> Iterator[None]:
    """Trace elementwise kernels for a compiler in this context, where the GPU supports it."""
    token = _CHOSEN.set(compiler)
    try:
        yield
    finally:
        _CHOSEN.reset(token)
