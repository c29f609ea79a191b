"""Reads weights in float8 with a scale for each block, as DeepSeek-V3 and Kimi K2 are published.

A weight is two tensors: `NAME`, e4m3 [N, K], and `NAME_scale_inv`, float32 [N / 128, K / 128],
rounded up. A number is the product of its e4m3 value and its block's scale, rounded to bfloat16, as
in DeepSeek's own conversion.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxpar.config import ConfigError
from jaxpar.convert.safetensors_file import Stored

SUFFIX = "_scale_inv"

#: Rows and columns of a block.
BLOCK = 128

#: What to do about tensors that do not fit each other.
FIX = "use the weights and the scales of one revision of the model"

#: The dtype of a dequantized weight.
DTYPE = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Float8Blocks:
    """A weight [N, K] in float8, with a scale for each block."""

    values: Stored
    scales: Stored

    @property
    def dtype(self) -> str:
        """Name of the dtype in safetensors, dequantized."""
        return "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, dequantized."""
        return math.prod(self.shape) * DTYPE.itemsize

    def open(self) -> np.ndarray:
        """Dequantize the weight: bfloat16 in memory."""
        values, scales, out = self.values.open(), self.scales.open(), np.empty(self.shape, DTYPE)
        for i, row in enumerate(scales):  # the float32 values of one row of blocks at a time
            rows = slice(i * BLOCK, (i + 1) * BLOCK)
            each = np.repeat(row, BLOCK)[: self.shape[1]]
            out[rows] = (values[rows].astype(np.float32) * each).astype(DTYPE)
        return out


def is_float8_blocks(quantization: Any) -> bool:
    """Return whether `quantization_config` describes such weights."""
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return False
    fmt, block = quantization.get("fmt", "e4m3"), quantization.get("weight_block_size")
    return fmt == "e4m3" and block == [BLOCK, BLOCK]


def dequantized(stored: Mapping[str, Stored]) -> dict[str, Stored | Float8Blocks]:
    """Replace each weight in float8 and its scales by the weight that they are.

    Raises:   ConfigError that names a tensor of float8 without scales, or scales of no weight.
    """
    found: dict[str, Stored | Float8Blocks] = {}
    for name, tensor in stored.items():
        if name.endswith(SUFFIX):
            weight = stored.get(name.removesuffix(SUFFIX))
            if weight is None or weight.dtype != "F8_E4M3":
                rule = f"is a scale, but {name.removesuffix(SUFFIX)} is no weight in float8"
                raise ConfigError(name, list(tensor.shape), rule, FIX)
        elif tensor.dtype == "F8_E4M3":
            found[name] = _paired(name, tensor, stored.get(name + SUFFIX))
        else:
            found[name] = tensor
    return found


def _paired(name: str, values: Stored, scales: Stored | None) -> Float8Blocks:
    if len(values.shape) != 2:
        rule = "is of float8, and must be a matrix"
        raise ConfigError(name, list(values.shape), rule, FIX)
    blocks = tuple(-(-n // BLOCK) for n in values.shape)
    if scales is None or scales.dtype != "F32" or scales.shape != blocks:
        there = None if scales is None else list(scales.shape)
        rule = f"must be float32 of shape {list(blocks)}, a number for each block of {name}"
        raise ConfigError(name + SUFFIX, there, rule, FIX)
    return Float8Blocks(values, scales)
