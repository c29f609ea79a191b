"""Reads weights in MXFP4, as gpt-oss's experts are published, by dequantizing them.

A weight is two tensors of bytes. In `..._blocks`, a byte has two numbers of 4 bits, e2m1, the first
in its low half; in `..._scales`, a byte is the exponent of 32 numbers, plus 127. Both have the
dimension of the product last, so that the weight is their transpose.

Source:   OCP Microscaling Formats (MX) v1.0, 2023: E2M1 numbers, E8M0 scales, blocks of 32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxpar.config import ConfigError
from jaxpar.convert.safetensors_file import Stored

BLOCKS, SCALES = "_blocks", "_scales"

#: Numbers that share a scale, and bytes that hold them.
NUMBERS, BYTES = 32, 16

#: What to do about tensors that do not fit each other.
FIX = "use the weights and the scales of one revision of the model"

#: The dtype of a dequantized weight; it has all of its values.
DTYPE = np.dtype(ml_dtypes.bfloat16)

_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)

#: The numbers of each code of 4 bits.
E2M1 = np.concatenate([_POSITIVE, -_POSITIVE])

#: The two numbers of each byte, [256, 2].
_PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=-1)


@dataclass(frozen=True)
class Mxfp4:
    """A weight [E, D, F] in MXFP4: blocks [E, F, D / 32, 16] and scales [E, F, D / 32]."""

    blocks: Stored
    scales: Stored

    @property
    def dtype(self) -> str:
        """Name of the dtype in safetensors, dequantized."""
        return "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        E, F, groups, _ = self.blocks.shape
        return E, groups * NUMBERS, F

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, dequantized."""
        return math.prod(self.shape) * DTYPE.itemsize

    def open(self) -> np.ndarray:
        """Dequantize the weight: a transposed view of bfloat16 in memory."""
        E, D, F = self.shape
        out = np.empty((E, F, D), DTYPE)
        blocks, scales = self.blocks.open(), self.scales.open()
        for e in range(E):  # the float32 values of one expert at a time
            numbers = _PAIRS[blocks[e]].reshape(F, -1, NUMBERS)
            exponents = scales[e].astype(np.int32) - 127
            out[e] = np.ldexp(numbers, exponents[..., None]).reshape(F, D).astype(DTYPE)
        return out.transpose(0, 2, 1)


def dequantized(stored: Mapping[str, Stored]) -> dict[str, Stored | Mxfp4]:
    """Replace each pair of blocks and scales by the weight that they are.

    Raises:   ConfigError that names a tensor of bytes that is no such pair.
    """
    found: dict[str, Stored | Mxfp4] = {}
    for name, tensor in stored.items():
        if tensor.dtype != "U8":
            found[name] = tensor
        elif name.endswith(BLOCKS):
            weight = name.removesuffix(BLOCKS)
            found[weight] = _paired(name, tensor, stored.get(weight + SCALES))
        elif not name.endswith(SCALES) or name.removesuffix(SCALES) + BLOCKS not in stored:
            rule = "is of bytes, and no part of a weight in MXFP4"
            fix = "use the weights as published, not a quantized copy"
            raise ConfigError(name, tensor.dtype, rule, fix)
    return found


def _paired(name: str, blocks: Stored, scales: Stored | None) -> Mxfp4:
    shape = blocks.shape
    if len(shape) != 4 or shape[-1] != BYTES:
        rule = f"must be of shape [experts, rows, groups, {BYTES}]"
        raise ConfigError(name, list(shape), rule, FIX)
    if scales is None or scales.dtype != "U8" or scales.shape != shape[:-1]:
        rule = f"must be bytes of shape {list(shape[:-1])}, as {name} says"
        there = None if scales is None else list(scales.shape)
        raise ConfigError(name.removesuffix(BLOCKS) + SCALES, there, rule, FIX)
    return Mxfp4(blocks, scales)
