"""Peak FLOP/s of GPUs, from vendor datasheets."""

import re

#: Peak FLOP/s of dense bf16 matmuls of one device, by complete words of its name; the first match
#: counts. From vendor datasheets, whose figures with sparsity are twice these.
PEAK_FLOPS = {
    "H200 NVL": 835.5e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756.5e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Return the peak FLOP/s of a device by its name, or None if it is not in the table."""
    words = " ".join(["", *re.split(r"[\s-]+", device_kind), ""])  # an RTX A1000 is not an A100
    return next((peak for name, peak in PEAK_FLOPS.items() if f" {name} " in words), None)
