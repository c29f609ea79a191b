"""What the Triton kernels are written with, and the only file that calls Triton.

JAX deprecates Pallas' own Triton backend. So kernels are compiled by Triton's package, which
`jax_triton` calls: their bodies are JAX, `source.py` writes them in Triton's language, and Pallas
only interprets them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpar.kernels.attention.hopper.mma import varying_as
from jaxpar.kernels.attention.triton.source import assembly_p, compiled, source_of
from jaxpar.kernels.platform import MISSING, Platform

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

    def call(*operands):
        varying = jax.typeof(operands[0]).manual_axis_type
        shapes = [jax.ShapeDtypeStruct(*result, manual_axis_type=varying) for result in results]
        return pl.pallas_call(
            kernel, grid=(programs,), out_shape=shapes, name=name, interpret=True
        )(*operands)

    if interpret:
        return call(*operands)
    (traced,) = jax.make_jaxpr(call)(*map(_type_of, operands)).eqns
    major, minor = Platform.here().compute_capability.split(".")
    with jax.named_scope(name):  # by which profiles find it
        made = called(
            *operands,
            kernel=(source_of(name, traced.params["jaxpr"]), name),
            out_shape=[jax.ShapeDtypeStruct(*result) for result in results],
            grid=(programs,),
            name=name,
            num_warps=warps,
            num_stages=stages,
            compute_capability=int(major) * 10 + int(minor),
        )
    return [varying_as(x, operands[0]) for x in made]


def called(*operands: jax.Array, kernel: tuple[str, str], **how: Any) -> list[jax.Array]:
    """Call a kernel, given by its source and name, by `jax_triton`."""
    try:
        import jax_triton
    except ImportError as error:
        raise ImportError(f"{kernel[1]}, a Triton kernel: {MISSING}") from error

    return jax_triton.triton_call(*operands, kernel=compiled(*kernel), **how)


def _type_of(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def program() -> jax.Array:
    """Return the index of this program, an int32 scalar."""
    return pl.program_id(0)


def loop(first, end, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop`, as a loop whose loads Triton pipelines."""

    def step(state):
        i, end, carry = state
        return i + 1, end, body(i, carry)

    return lax.while_loop(lambda state: state[0] < state[1], step, (i32(first), i32(end), carry))[2]


def rows(first, count: int):
    """Return the index of `count` rows from `first`."""
    return pl.ds(first, count)


def dot(a, b, tf32: bool = False) -> jax.Array:
    """Multiply two matrices into float32. Tensor cores need every size to be at least 16.

    Args:     tf32: round float32 operands to TF32, which tensor cores multiply.
    """
    precision = lax.Precision.HIGHEST if a.dtype == f32 and not tf32 else None
    return lax.dot(a, b, precision=precision, preferred_element_type=f32)


def exp2(x: jax.Array, scale: float, less: jax.Array) -> jax.Array:
    """Compute 2 ** (x * scale - less) in float32: Triton fuses the product and the difference."""
    return jnp.exp2(x * scale - less)


def in_registers(x: jax.Array, interpret: bool) -> jax.Array:
    """Return a 16-bit tile as it is, so that a product reads it as left operand from registers.

    Triton copies a left operand to shared memory if a loop carries it, and no other operation comes
    between. This operation is a move in assembly, which the assembler removes.
    """
    if interpret or x.dtype == f32:
        return x
    return assembly_p.bind(x, text="mov.b32 $0, $1;", constraints="=r,r", pack=2)


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
