"""How the products of experts are computed: in the compute dtype, or in float8.

`experts.py` writes a layer's forward and backward in terms of these steps:

    rows            tokens -> rows to multiply
    times           rows times the matrix of their expert, or its transpose
    hidden          gate and up -> hidden values to multiply
    gradient_rows   gradients of tokens -> rows to multiply, and rows in the compute dtype
    hidden_backward the gradients of gate and up, to multiply, and in the compute dtype
    outer           the gradient of each expert's matrix
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from jaxpar.components import feed_forward
from jaxpar.config import ComputeConfig
from jaxpar.kernels import float8
from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.kernels.glu import Activation, GluKernel, SwiGLU
from jaxpar.kernels.grouped_matmul import reference
from jaxpar.kernels.grouped_matmul.api import Biases
from jaxpar.model.feed_forward import kernel_of, plain_activation
from jaxpar.parallel.expert.dispatch import Dispatch

#: gate and up of each row [R, F], or up alone.
type Inner = tuple[jax.Array, ...]


class Products(Protocol):
    """The steps of a layer's experts. Values to multiply are opaque to their reader."""

    @property
    def expert_dim(self) -> int:
        """0: matrices are [E, D, F] and [E, F, D]. 1: all are [D, E, F], as FSDP's gather over D
        leaves them, so that they are not copied."""

    def rows(self, plan: Dispatch, sent: Any) -> Any:
        """Return the token of each row, of what `Dispatch.out` sent."""

    def times(self, x: Any, w: tuple, tiles: kernels.Tiles, *, transpose: bool = False) -> Any:
        """Return the sum of x's rows times each matrix, [R, out] in the compute dtype.

        Args:     x: of `rows`, `hidden`, or a gradient. w: a matrix for each array of rows in x.
        """

    def hidden(self, gu: Inner, scale, tiles: kernels.Tiles, biases: Biases) -> Any:
        """Return the hidden values times scale.

        Args:     biases: of gate and up, which do not include them.
        """

    def gradient_rows(self, plan: Dispatch, sent: Any) -> tuple[Any, jax.Array]:
        """Return the gradient of each row, to multiply, and in the compute dtype."""

    def hidden_backward(
        self, gu: Inner, d_hidden, scale, tiles: kernels.Tiles, biases: Biases
    ) -> tuple:
        """Return the gradients of gate and up to multiply, and in the compute dtype the hidden
        values again and the gradients of gate, up and scale."""

    def outer(self, x: jax.Array, y: jax.Array, w: Any, tiles: kernels.Tiles) -> jax.Array:
        """Return x^T y over the rows of each expert: the gradient of its matrix in `w`."""

    def gradients(self, w: tuple, d_w: tuple) -> tuple:
        """Return gradients of matrices in the form of the matrices."""

    def matrices(self, w: tuple) -> tuple:
        """Return matrices to multiply, given arrays: in a step, `weights.gather` makes them."""


def products_of(expert: feed_forward.Glu, c: ComputeConfig, expert_dim: int) -> Products:
    """Return the products of experts by `compute.matmul_dtype`."""
    if c.matmul_dtype == "float8":
        return InFloat8(kernel_of(expert), expert_dim, c.float8_scaling)
    if isinstance(expert, feed_forward.Mlp):
        return WithoutGate(expert_dim, plain_activation(expert))
    return InComputeDtype(expert_dim, kernel_of(expert))


@dataclass(frozen=True)
class _OfArrays:
    """Products of arrays: values to multiply are arrays in the compute dtype."""

    expert_dim: int

    def rows(self, plan: Dispatch, sent: Any) -> jax.Array:
        return plan.permuted(sent)

    def times(self, x, w: tuple, tiles: kernels.Tiles, *, transpose: bool = False) -> jax.Array:
        x, w = (x, w) if isinstance(x, tuple) else (x, w[0])
        return kernels.grouped_matmul(x, w, tiles, transpose=transpose, expert_dim=self.expert_dim)

    def gradient_rows(self, plan: Dispatch, sent: Any) -> tuple[jax.Array, jax.Array]:
        rows = plan.permuted(sent)
        return rows, rows

    def outer(self, x: jax.Array, y: jax.Array, w: jax.Array, tiles: kernels.Tiles) -> jax.Array:
        return kernels.grouped_outer(x, y, tiles, expert_dim=self.expert_dim, dtype=w.dtype)

    def gradients(self, w: tuple, d_w: tuple) -> tuple:
        return d_w

    def matrices(self, w: tuple) -> tuple:
        return w


@dataclass(frozen=True)
class InComputeDtype(_OfArrays):
    """Products of GLUs in the compute dtype."""

    glu: GluKernel

    def hidden(self, gu: Inner, scale, tiles: kernels.Tiles, biases: Biases) -> jax.Array:
        gate, up = gu
        return kernels.glu_hidden(self.glu, gate, up, scale, tiles, biases)

    def hidden_backward(
        self, gu: Inner, d_hidden, scale, tiles: kernels.Tiles, biases: Biases
    ) -> tuple:
        gate, up = gu
        made = kernels.glu_backward(self.glu, gate, up, d_hidden, scale, tiles, biases)
        return made[1:3], made


@dataclass(frozen=True)
class WithoutGate(_OfArrays):
    """Products of experts of two matrices, act(x W_up) W_down, without biases."""

    activation: Activation

    def hidden(self, gu: Inner, scale, tiles: kernels.Tiles, biases: Biases) -> jax.Array:
        (up,) = gu
        return kernels.plain_hidden(self.activation, up, scale)

    def hidden_backward(
        self, gu: Inner, d_hidden, scale, tiles: kernels.Tiles, biases: Biases
    ) -> tuple:
        (up,) = gu
        made = kernels.plain_backward(self.activation, up, d_hidden, scale)
        return made[1:2], made


@dataclass(frozen=True)
class InFloat8:
    """Products of 8-bit rows, with a scale each, and 8-bit matrices, with one scale.

    Matrices are `float8.Float8Weight`s, and values to multiply are `kernels.Float8Rows`: e4m3, and
    e5m2 for gradients. Gradients of matrices are computed in the compute dtype, as with
    `compute.float8_scaling` row.
    """

    glu: GluKernel
    expert_dim: int
    scaling: Literal["tensor", "row"]
    """`compute.float8_scaling`."""

    def rows(self, plan: Dispatch, sent: Any) -> kernels.Float8Rows:
        return plan.permuted(sent, kernels.rows_taken_in_float8)

    def times(
        self, x: kernels.Float8Rows, w: tuple, tiles: kernels.Tiles, *, transpose: bool = False
    ) -> jax.Array:
        turned, dim = self._turned if not transpose else (lambda a: a), self.expert_dim
        dim = dim if transpose else 0
        values = tuple(turned(one.values) for one in w)
        dtype = w[0].gradient.dtype
        return kernels.scaled_matmul(x, values, w[0].scale, tiles, expert_dim=dim, dtype=dtype)

    def _turned(self, w: jax.Array) -> jax.Array:
        """Return [E, out, in] of a matrix that is stored with `out` last: tensor cores read 8-bit
        operands only with the contracted dimension contiguous in memory."""
        return jnp.swapaxes(jnp.moveaxis(w, self.expert_dim, 0), 1, 2)

    def hidden(self, gu: Inner, scale, tiles: kernels.Tiles, biases: Biases) -> kernels.Float8Rows:
        gate, up = gu
        if self._in_one_pass(biases):
            return kernels.swiglu_in_float8(gate, up, scale, tiles)
        wide = reference.glu_hidden(self.glu, gate, up, scale, tiles, biases)  # in float32
        return kernels.rounded((wide,), float8.FORWARD)

    def _in_one_pass(self, biases: Biases) -> bool:
        """Whether the pass of the activation also rounds: with other GLUs and with biases, XLA
        rounds in a separate pass."""
        return isinstance(self.glu, SwiGLU) and all(bias is None for bias in biases)

    def gradient_rows(self, plan: Dispatch, sent: Any) -> tuple[kernels.Float8Rows, jax.Array]:
        return plan.permuted(sent, kernels.gradients_taken_in_float8)

    def hidden_backward(
        self, gu: Inner, d_hidden, scale, tiles: kernels.Tiles, biases: Biases
    ) -> tuple:
        gate, up = gu
        if self._in_one_pass(biases):
            made, rows = kernels.swiglu_backward_in_float8(gate, up, d_hidden, scale, tiles)
            return rows, made
        made = kernels.glu_backward(self.glu, gate, up, d_hidden, scale, tiles, biases)
        return kernels.rounded(made[1:3], float8.BACKWARD), made

    def outer(self, x: jax.Array, y: jax.Array, w: Any, tiles: kernels.Tiles) -> jax.Array:
        dtype = w.gradient.dtype
        return kernels.grouped_outer(x, y, tiles, expert_dim=self.expert_dim, dtype=dtype)

    def gradients(self, w: tuple, d_w: tuple) -> tuple:
        pairs = zip(w, d_w, strict=True)
        return tuple(one.replace(values=None, scale=None, gradient=d) for one, d in pairs)

    def matrices(self, w: tuple) -> tuple:
        top = functools.reduce(jnp.maximum, map(float8.max_magnitude, w))
        scale = float8.power_of_two_scale(top, float8.FORWARD)
        return tuple(float8.quantize_weight(one, scale, self.scaling) for one in w)
