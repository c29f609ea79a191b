"""Matrix products of experts: each expert multiplies its own rows. Start at `api.py`."""

from jaxpar.kernels.grouped_matmul.api import (
    glu_backward,
    grouped_matmul,
    grouped_outer,
    rows_added,
    rows_taken,
)
from jaxpar.kernels.grouped_matmul.bias import add_bias, bias_gradient
from jaxpar.kernels.grouped_matmul.capability import refusal, tile_rows
from jaxpar.kernels.grouped_matmul.tiles import Tiles, max_rows, tiles_of

__all__ = [
    "Tiles",
    "add_bias",
    "bias_gradient",
    "glu_backward",
    "grouped_matmul",
    "grouped_outer",
    "max_rows",
    "refusal",
    "rows_added",
    "rows_taken",
    "tile_rows",
    "tiles_of",
]
