"""The products of experts on Hopper GPUs, in Pallas (Mosaic GPU)."""

from jaxpar.kernels.grouped_matmul.hopper.glu import glu_backward, glu_hidden
from jaxpar.kernels.grouped_matmul.hopper.matmul import grouped_matmul, scaled_matmul
from jaxpar.kernels.grouped_matmul.hopper.outer import grouped_outer
from jaxpar.kernels.grouped_matmul.hopper.rows import (
    rows_added,
    rows_taken,
    rows_taken_in_float8,
    swiglu_backward_in_float8,
    swiglu_in_float8,
)

__all__ = [
    "glu_backward",
    "glu_hidden",
    "grouped_matmul",
    "grouped_outer",
    "rows_added",
    "rows_taken",
    "rows_taken_in_float8",
    "scaled_matmul",
    "swiglu_backward_in_float8",
    "swiglu_in_float8",
]
