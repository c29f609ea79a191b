"""The only file that calls Pallas' Triton backend, so that another compiler can replace it.

JAX deprecates this backend in favor of Mosaic GPU, and will remove it. In JAX 0.11, it is the only
one whose matrix products compile for every NVIDIA GPU since Ampere.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

f32, i32 = jnp.float32, jnp.int32


def launch(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    results: Sequence[tuple[tuple[int, ...], Any]],
    *,
    programs: int,
    warps: int,
    stages: int,
    name: str,
    interpret: bool,
) -> list[jax.Array]:
    """Run a kernel over a grid of programs. Its references are whole arrays in global memory.

    Args:     results: shape and dtype of each. Their types vary over the mesh axes of the first
              operand's. warps: of each program. stages: of the pipeline of loads in loops.
    """
    varying = jax.typeof(operands[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(*result, manual_axis_type=varying) for result in results]
    return pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        name=name,
        interpret=interpret,
    )(*operands)


def program() -> jax.Array:
    """Return the index of this program, an int32 scalar."""
    return pl.program_id(0)


def rows(first, count: int):
    """Return the index of `count` rows from `first`."""
    return pl.ds(first, count)


def dot(a, b, tf32: bool = False) -> jax.Array:
    """Multiply two matrices into float32. Tensor cores need every size to be at least 16.

    Args:     tf32: round float32 operands to TF32, which tensor cores multiply.
    """
    precision = lax.Precision.HIGHEST if a.dtype == f32 and not tf32 else None
    return lax.dot(a, b, precision=precision, preferred_element_type=f32)


def exp2(x: jax.Array, scale: float, less: jax.Array, interpret: bool) -> jax.Array:
    """Compute 2 ** (x * scale - less) in float32, by one fused multiply-add and one exponential.

    These are instructions in assembly because XLA compiles Triton code without fusing a product and
    a sum, and without the exponential of the special function unit alone.
    """
    if interpret:
        return jnp.exp2(x * scale - less)
    bits = struct.pack(">f", scale).hex()
    (y,) = triton.elementwise_inline_asm(
        "{ .reg .f32 a, b; neg.ftz.f32 b, $2; "
        f"fma.rn.ftz.f32 a, $1, 0f{bits}, b; ex2.approx.ftz.f32 $0, a; }}",
        args=[x, less],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, f32)],
    )
    return y


def in_registers(x: jax.Array, interpret: bool) -> jax.Array:
    """Return a 16-bit tile as it is, so that a product reads it as left operand from registers.

    Triton copies a left operand to shared memory if a loop carries it, and no other operation comes
    between. This operation is a move in assembly, which the assembler removes.
    """
    if interpret or x.dtype == f32:
        return x
    (y,) = triton.elementwise_inline_asm(
        "mov.b32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def spread(vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """Broadcast a value per row (axis 0) or per column (axis 1) over a tile."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """Return the row or column indices of a tile, int32."""
    return lax.broadcasted_iota(i32, shape, axis)


def div(a, n: int) -> jax.Array:
    """Divide a non-negative int32, rounding down."""
    return lax.div(a, i32(n))


def mod(a, n: int) -> jax.Array:
    """Return the remainder of a non-negative int32."""
    return lax.rem(a, i32(n))
