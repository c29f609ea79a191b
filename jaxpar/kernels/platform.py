"""What the kernels run on."""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Platform:
    """What the kernels run on.

    name                 "gpu" or "cpu".
    kind                 the device's name, such as "NVIDIA H200".
    compute_capability   of an NVIDIA GPU, such as "9.0"; empty elsewhere.
    """

    name: str
    kind: str = ""
    compute_capability: str = ""

    @staticmethod
    def here() -> "Platform":
        """That of the first device, or what is compiled for (`compiling_for`)."""
        if (assumed := _ASSUMED.get()) is not None:
            return assumed
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", "")
        return Platform(device.platform, device.device_kind, str(capability))


_ASSUMED: contextvars.ContextVar[Platform | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def compiling_for(platform: Platform) -> Iterator[None]:
    """Kernels traced meanwhile are those for `platform`, which need not be here."""
    token = _ASSUMED.set(platform)
    try:
        yield
    finally:
        _ASSUMED.reset(token)
