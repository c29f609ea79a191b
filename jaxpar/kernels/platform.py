"""The platform that kernels run on."""

import contextlib
import contextvars
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

#: The first compute capability of the elementwise kernels: that of Hopper, which has TMA.
LEAST = 9.0


@dataclass(frozen=True)
class Platform:
    """The platform that kernels run on.

    name                 "gpu" or "cpu".
    kind                 Name of the device, such as "NVIDIA H200".
    compute_capability   Of an NVIDIA GPU, such as "9.0"; otherwise empty.
    """

    name: str
    kind: str = ""
    compute_capability: str = ""

    @property
    def runs_elementwise_kernels(self) -> bool:
        """Whether the elementwise kernels run there. Elsewhere, XLA compiles the same functions."""
        return self.name == "gpu" and float(self.compute_capability) >= LEAST

    @staticmethod
    def here() -> "Platform":
        """Return the platform of the first device, or of the enclosing `compiling_for`."""
        if (assumed := _ASSUMED.get()) is not None:
            return assumed
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", "")
        return Platform(device.platform, device.device_kind, str(capability))


_ASSUMED: contextvars.ContextVar[Platform | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def compiling_for(platform: Platform) -> Iterator[None]:
    """Trace kernels for `platform` in this context, even if no such device is present."""
    token = _ASSUMED.set(platform)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


#: Why this process compiles no Triton kernel.
MISSING = "jax_triton is not installed. Fix: pip install 'jaxpar[triton]'"


def triton_missing(platform: Platform) -> str | None:
    """Return why this process cannot compile Triton kernels for its GPU; None if it can, and for
    any other platform."""
    here = _ASSUMED.get() is None and platform.name == "gpu" and platform == Platform.here()
    return MISSING if here and importlib.util.find_spec("jax_triton") is None else None


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def imported_when_used(name: str) -> ModuleType:
    """Return what stands for a module until one of its attributes is used: a compiler of kernels,
    which only GPUs need."""
    return _Later(name)
