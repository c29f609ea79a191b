"""Peak FLOP/s of GPUs, from their makers' data sheets."""

import re

#: Dense bf16 matmul peak in FLOP/s of one device, by whole words of its name; the first that are in
#: it count. Vendor datasheets, whose figures with sparsity are twice these.
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
}


def peak_flops(device_kind: str) -> float | None:
    """Peak of a device by its name, or None when it is not in the table."""
    words = " ".join(["", *re.split(r"[\s-]+", device_kind), ""])  # an RTX A1000 is no A100
    return next((peak for name, peak in PEAK_FLOPS.items() if f" {name} " in words), None)
