"""float8 matmuls. Rounding is in `rounding.py`, multiplication in `matmul.py`."""

from jaxpar.kernels.float8.matmul import SCALE, Float8Weight, matmul, quantize_weight
from jaxpar.kernels.float8.rounding import (
    BACKWARD,
    FORWARD,
    max_magnitude,
    power_of_two_scale,
    quantize,
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "SCALE",
    "Float8Weight",
    "matmul",
    "max_magnitude",
    "power_of_two_scale",
    "quantize",
    "quantize_weight",
]
