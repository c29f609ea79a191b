"""Matmuls of 8-bit operands with gradients of their own.

Three products belong to a layer y = x w: the output, the gradient of x (dy times w transposed) and
the gradient of w (x transposed times dy). Scales are taken from the operands of the step itself.

    scaling   output           gradient of x     gradient of w
    tensor    e4m3 x e4m3      e5m2 x e4m3       e4m3 x e5m2
    row       e4m3 x e4m3      e5m2 x e4m3       compute dtype

"tensor": one scale for each operand. "row": one for each token of x and of dy, which the output
carries out again; the gradient of w sums over tokens, so it cannot, and stays in the compute dtype.
A weight has one scale either way, so that one 8-bit copy serves two products. One per column would
change only elements below some 2^-14 of the weight's largest (`quantize.py`).

Hopper's tensor cores read 8-bit operands only with the summed dimension contiguous in memory. Of an
activation or gradient the transposed copy is written in the pass that rounds
(`quantize_transpose.py`).
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.kernels.float8.amax import without_amax
from jaxpar.kernels.float8.quantize import (
    BACKWARD,
    FORWARD,
    max_magnitude,
    power_of_two_scale,
    quantize,
)
from jaxpar.kernels.float8.quantize_transpose import quantize_both_ways

type Scaling = Literal["tensor", "row"]

#: Remat name of the scales of activations: one number each, which spares the backward a pass over
#: the tensor. Saved under every policy.
SCALE = "float8_scale"

#: Hopper adds up 8-bit products with some 14 bits unless told to carry the sum to float32 registers
#: every few products, which costs speed. XLA takes the fast way for DEFAULT and only then. The
#: output takes it, gradients, with their longer sums, do not: as Transformer Engine and torchao.
OUTPUT_PRECISION = lax.Precision.DEFAULT
GRADIENT_PRECISION = lax.Precision.HIGHEST


@flax.struct.dataclass
class Float8Weight:
    """A weight as multiplied: `values / scale`."""

    values: jax.Array
    """e4m3 [in, out]."""
    scale: jax.Array
    """float32 scalar, a power of two."""
    gradient: jax.Array
    """[in, out] in the compute dtype. Never read: the weight's gradient is this array's, since an
    8-bit array can only have an 8-bit gradient."""
    scaling: Scaling = flax.struct.field(pytree_node=False)
    """How activations and gradients are scaled in products with this weight."""
    outer: int = flax.struct.field(pytree_node=False, default=-2)
    """The dim that is outermost in memory where the gradient goes, -2 or -1."""

    def products(self, x: Any, weights: Sequence[Any], name: str, *, with_amax: bool) -> list[Any]:
        """`matmul`."""
        return matmul(x, weights, name, with_amax=with_amax)


class Operand(Protocol):
    """What is rounded and multiplied: an array, or what comes in the place of one (`WithAmax`,
    `norm.Unmaterialized`)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self) -> "Operand":
        """The same as one matrix."""

    def max_magnitude(self) -> jax.Array:
        """The largest magnitude, float32."""

    def readable(self) -> Any:
        """What `quantize_both_ways` reads: an array, or `Unmaterialized`."""

    def gradient(self, d_x: jax.Array) -> "Operand":
        """The gradient of what came as this, d_x being that of the array."""


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
    """A whole weight, rounded. Its gradient goes to w, as if nothing had been rounded.

    Args:     w: [in, out], compute dtype. scale: float32 scalar. scaling, outer: of the
              `Float8Weight`.
    """
    values = quantize(lax.stop_gradient(w), lax.stop_gradient(scale), FORWARD)
    return Float8Weight(values, lax.stop_gradient(scale), w, scaling, outer)


def matmul(
    x: jax.Array | Operand, weights: Sequence[Float8Weight], name: str, *, with_amax: bool = False
) -> list[Any]:
    """x times each weight; x is rounded once.

    Args:     x: [..., in], compute dtype. weights: of one `scaling`. name: remat name under which
              the rounded x may be saved for the gradients of the weights ("tensor"; for "row" that
              is x itself, for the caller to name). with_amax: whether the outputs' gradients come
              with their largest magnitudes.
    Returns:  [..., out] each, compute dtype; `WithAmax`, if their gradients are.
    Communication: none; with tensor parallelism each rank scales its own operands.
    Source:   Micikevicius et al. 2022 (2209.05433), section 4; "row": torchao's
              `rowwise_with_gw_hp`.
    """
    x = Plain(x) if isinstance(x, jax.Array) else x
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
    """A rounded matrix as bits in a row, under a remat name.

    Bits, since JAX rounds what `jax.checkpoint` saves once more, to its own dtype, as if e4m3 had
    infinities (`reduce_precision`): what lies above 240 would become one. In a row, which has one
    layout, so that XLA keeps it as it was written.
    """
    return checkpoint_name(lax.bitcast_convert_type(q, jnp.uint8).reshape(-1), name)


def _scale_of(x: Operand, scaling: Scaling, dtype: Any) -> jax.Array:
    """That of all of x, [tokens, features], or of each token."""
    seen = max_magnitude(x.readable(), 1) if scaling == "row" else x.max_magnitude()
    return power_of_two_scale(seen, dtype)


def _product(a, b, *, dims: tuple[int, int], scales: tuple, precision: Any, dtype: Any):
    """The product of two scaled matrices over one dim of each, scaled back, which rounds nothing.

    8-bit operands up to the dot, and one scalar that multiplies its result: this is the form that
    XLA turns into one call of cuBLASLt. Scales of rows cost a pass, or join the next one.

    Args:     scales: of the two operands; the second may be one for each row of the result.
    """
    contracted = (((dims[0],), (dims[1],)), ((), ()))
    y = lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=dtype)
    first, second = scales
    if second.ndim == 0:
        return y * (1 / (first * second)).astype(dtype)
    return y * (1 / first).astype(dtype) * (1 / second).astype(dtype)[:, None]
