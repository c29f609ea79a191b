"""The GPUs on which the elementwise kernels run."""

from jaxpar.kernels.platform import Platform

#: The first compute capability: that of Hopper, which has TMA.
LEAST = 9.0


def runs_on(platform: Platform) -> bool:
    """Return whether a platform runs the kernels. Elsewhere, XLA compiles the same functions."""
    return platform.name == "gpu" and float(platform.compute_capability) >= LEAST


def runs_here() -> bool:
    """Return whether this platform runs the kernels."""
    return runs_on(Platform.here())
