"""Matrix products of experts: each expert multiplies its own rows. Start at `api.py`."""

from jaxpar.kernels.grouped_matmul.api import (
    Parts,
    glu_backward,
    glu_hidden,
    grouped_matmul,
    grouped_outer,
    rows_added,
    rows_taken,
)
from jaxpar.kernels.grouped_matmul.capability import refusal, tile_rows
from jaxpar.kernels.grouped_matmul.float8 import (
    Float8Rows,
    gradients_taken_in_float8,
    rounded,
    rows_taken_in_float8,
    scaled_matmul,
    swiglu_backward_in_float8,
    swiglu_in_float8,
)
from jaxpar.kernels.grouped_matmul.reference import (
    add_bias,
    bias_gradient,
    plain_backward,
    plain_hidden,
)
from jaxpar.kernels.grouped_matmul.tiles import Tiles, max_rows, tiles_of

__all__ = [
    "Float8Rows",
    "Parts",
    "Tiles",
    "add_bias",
    "bias_gradient",
    "glu_backward",
    "glu_hidden",
    "gradients_taken_in_float8",
    "grouped_matmul",
    "grouped_outer",
    "max_rows",
    "plain_backward",
    "plain_hidden",
    "refusal",
    "rounded",
    "rows_added",
    "rows_taken",
    "rows_taken_in_float8",
    "scaled_matmul",
    "swiglu_backward_in_float8",
    "swiglu_in_float8",
    "tile_rows",
    "tiles_of",
]
