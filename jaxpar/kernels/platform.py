"""What the kernels run on."""

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
        """That of the first device."""
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", "")
        return Platform(device.platform, device.device_kind, str(capability))
