"""Matmuls of 8-bit operands, with custom gradients.

A layer y = x w has three products: the output, the gradient of x (dy times w transposed) and the
gradient of w (x transposed times dy). Scales are computed from the operands of the same step.

    scaling   output           gradient of x     gradient of w
    tensor    e4m3 x e4m3      e5m2 x e4m3       e4m3 x e5m2
    row       e4m3 x e4m3      e5m2 x e4m3       compute dtype

With "tensor", each operand has one scale. With "row", x and dy have one scale per token, which is
divided out of the product. This is not possible for the gradient of w, which sums over tokens, so
it is computed in the compute dtype. A weight has one scale in both cases, so that one 8-bit copy
serves two products. One scale per column would change only elements below about 2^-14 of the
weight's largest (`rounding.py`).

Hopper's tensor cores read 8-bit operands only with the contracted dimension contiguous in memory.
The pass that rounds an activation or gradient therefore also writes its transpose
(`rounding.py`).
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.kernels.float8.rounding import (
    BACKWARD,
    FORWARD,
    max_magnitude,
    power_of_two_scale,
    quantize,
    quantize_both_ways,
    without_amax,
)

type Scaling = Literal["tensor", "row"]

#: Remat name of the scales of activations. A scale is a single value and saves the backward a pass
#: over the tensor, so every policy saves it.
SCALE = "float8_scale"

#: Hopper accumulates 8-bit products with about 14 bits, unless sums are moved to float32 registers
#: every few products, which is slower. XLA uses fast accumulation only for DEFAULT. As in
#: Transformer Engine and torchao, the output uses it, and gradients, with longer sums, do not.
OUTPUT_PRECISION = lax.Precision.DEFAULT
GRADIENT_PRECISION = lax.Precision.HIGHEST


@flax.struct.dataclass
class Float8Weight:
    """A quantized weight, `values / scale`."""

    values: jax.Array
    """e4m3 [in, out]; of experts, with a dim of experts."""
    scale: jax.Array
    """float32 scalar, a power of two."""
    gradient: jax.Array
    """Like `values`, in the compute dtype. Never read. Its gradient is the gradient of the weight,
    since the gradient of an 8-bit array would have 8 bits."""
    scaling: Scaling = flax.struct.field(pytree_node=False)
    """Scaling of activations and gradients in products with this weight."""
    outer: int = flax.struct.field(pytree_node=False, default=-2)
    """The outermost dim in memory of the gradient's destination, -2 or -1."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.gradient.shape

    def products(self, x: Any, weights: Sequence[Any], name: str, *, with_amax: bool) -> list[Any]:
        """Call `matmul`."""
        return matmul(x, weights, name, with_amax=with_amax)


class Operand(Protocol):
    """An operand to round and multiply: an array (`Plain`), `WithAmax` or `norm.Unmaterialized`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self) -> "Operand":
        """Reshape to a matrix."""

    def max_magnitude(self) -> jax.Array:
        """Return the largest magnitude, float32."""

    def readable(self) -> Any:
        """Return the input of `quantize_both_ways`: an array, or `Unmaterialized`."""

    def gradient(self, d_x: jax.Array) -> "Operand":
        """Return the gradient of this operand, given the gradient d_x of the array."""


@flax.struct.dataclass
class Plain:
    """An array as an `Operand`."""

    values: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def rows(self) -> "Plain":
        return Plain(self.values.reshape(-1, self.shape[-1]))

    def max_magnitude(self) -> jax.Array:
        return max_magnitude(self.values)

    def readable(self) -> jax.Array:
        return self.values

    def gradient(self, d_x: jax.Array) -> "Plain":
        return Plain(d_x)


def quantize_weight(
    w: jax.Array, scale: jax.Array, scaling: Scaling, outer: int = -2
) -> Float8Weight:
    """Round a complete weight. Its gradient is that of w, as if w were not rounded.

    Args:     w: [in, out], compute dtype. scale: float32 scalar. scaling, outer: as in
              `Float8Weight`.
    """
    values = quantize(lax.stop_gradient(w), lax.stop_gradient(scale), FORWARD)
    return Float8Weight(values, lax.stop_gradient(scale), w, scaling, outer)


def matmul(
    x: jax.Array | Operand, weights: Sequence[Float8Weight], name: str, *, with_amax: bool = False
) -> list[Any]:
    """Compute x times each weight, rounding x once.

    Args:     x: [..., in], compute dtype. weights: all with the same `scaling`. name: remat name of
              the rounded x, which the gradients of the weights read with "tensor". With "row" they
              read x itself, which the caller names. with_amax: return the outputs as `WithAmax`, so
              that their gradients are too.
    Returns:  [..., out] each, compute dtype.
    Communication: none; with tensor parallelism each rank scales its own operands.
    Source:   Micikevicius et al. 2022 (2209.05433), section 4; "row": torchao's
              `rowwise_with_gw_hp`.
    """
    x = Plain(x) if isinstance(x, jax.Array) else x
    read: Any = x.readable()
    if weights[0].scaling == "row" and not isinstance(read, jax.Array):
        x = Plain(read.written())  # computing the scale of each row needs a pass over the array
    outputs = _matmul(x.rows(), tuple(weights), name, with_amax)
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in outputs]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul(x, weights, name, with_amax):
    return _forward(x, weights, name, with_amax)[0]


def _forward(x, weights, name, with_amax):
    kind = jax.tree.map(lambda _: None, x)  # without its arrays
    scale = checkpoint_name(_scale_of(x, weights[0].scaling, FORWARD), SCALE)
    x = x.readable()
    if weights[0].scaling == "tensor":
        q, transposed = quantize_both_ways(x, scale, FORWARD)
        kept = _bits(transposed, name)
    else:
        q, kept = quantize(x, scale[:, None], FORWARD), x
    product = functools.partial(_product, dims=(1, 0), precision=OUTPUT_PRECISION, dtype=x.dtype)
    outputs = tuple(product(q, w.values, scales=(w.scale, scale)) for w in weights)
    outputs = tuple(map(without_amax, outputs)) if with_amax else outputs
    return outputs, (kept, scale, weights, kind)


def _backward(name, with_amax, saved, d_outputs):
    kept, scale, weights, kind = saved
    d_x, d_weights = [], []
    product = functools.partial(_product, precision=GRADIENT_PRECISION, dtype=d_outputs[0].dtype)
    for dy, w in zip(d_outputs, weights, strict=True):
        dy = dy if with_amax else Plain(dy)
        g_scale = _scale_of(dy, w.scaling, BACKWARD)
        dy = dy.readable()
        if w.scaling == "tensor":
            g, transposed = quantize_both_ways(dy, g_scale, BACKWARD)
            x = lax.bitcast_convert_type(kept, FORWARD).reshape(w.values.shape[0], -1)
            operands = (x, transposed) if w.outer == -2 else (transposed, x)
            d_w = product(*operands, dims=(1, 1), scales=(scale, g_scale))
            d_w = d_w if w.outer == -2 else d_w.T
        else:
            g = quantize(dy, g_scale[:, None], BACKWARD)
            d_w = lax.dot_general(kept, dy, (((0,), (0,)), ((), ())))
        d_x.append(product(g, w.values, dims=(1, 1), scales=(w.scale, g_scale)))
        d_weights.append(w.replace(values=None, scale=None, gradient=d_w.astype(w.gradient.dtype)))
    return kind.gradient(functools.reduce(jnp.add, d_x)), tuple(d_weights)


_matmul.defvjp(_forward, _backward)


def _bits(q: jax.Array, name: str) -> jax.Array:
    """Flatten a rounded matrix to uint8 and give it a remat name.

    uint8, because JAX applies `reduce_precision` to float values that `jax.checkpoint` saves, as if
    e4m3 had infinities: values above 240 would become infinite. Flat, because a one-dimensional
    array has only one layout, so XLA stores it as written.
    """
    return checkpoint_name(lax.bitcast_convert_type(q, jnp.uint8).reshape(-1), name)


def _scale_of(x: Operand, scaling: Scaling, dtype: Any) -> jax.Array:
    """Compute the scale of x, [tokens, features], or of each token."""
    seen = max_magnitude(x.readable(), 1) if scaling == "row" else x.max_magnitude()
    return power_of_two_scale(seen, dtype)


def _product(a, b, *, dims: tuple[int, int], scales: tuple, precision: Any, dtype: Any):
    """Multiply two scaled matrices over one dim of each and divide out the scales, which is exact.

    XLA compiles a dot of 8-bit operands, with a scalar that multiplies its result, to one call of
    cuBLASLt. Scales of rows need a separate pass, or are fused into the next one.

    Args:     scales: of the two operands. The second may have one scale per row of the result.
    """
    contracted = (((dims[0],), (dims[1],)), ((), ()))
    y = lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=dtype)
    first, second = scales
    if second.ndim == 0:
        return y * (1 / (first * second)).astype(dtype)
    return y * (1 / first).astype(dtype) * (1 / second).astype(dtype)[:, None]
