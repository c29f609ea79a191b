"""Common functions of the Hopper kernels: matrix multiplications, shared memory, named operands.

Pallas' interpreter, which checks barriers and races on a CPU, does not support accumulators that
live longer than one multiplication, or operands in registers. `multiply`, `accumulators` and `held`
therefore have two implementations, and the kernels that call them have one.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace as Refs
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.tiles import Bounds, Visits, padding

LOG2E = math.log2(math.e)
#: Number of rows that one warpgroup multiplies at a time.
M = 64
#: Register layouts of an accumulator, of one value per row, and of one value per column.
TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
f32, i32 = jnp.float32, jnp.int32


@dataclass(frozen=True)
class KernelShape:
    """The static parameters of a kernel. `rows` and `cols` count the mask's bounds.

    T and S are multiples of the tile sizes. Operands [B, T, H, K] may be shorter: past their end,
    TMA reads zeros and writes nothing. (The interpreter needs full tiles.) Operands [B, H, T] must
    be padded to full tiles, because copies of single rows do not check for the end.
    """

    B: int
    T: int
    S: int
    H: int
    G: int
    K: int
    dtype: Any
    q: int
    kv: int
    stages: int
    in_order: bool
    rows: int
    cols: int
    has_low: bool
    has_segments: bool
    ranged: bool
    listed: bool
    interpret: bool
    heads: int = 0

    @property
    def consumers(self) -> int:
        """Number of consumer warpgroups, in kernels whose consumers share a tile's queries."""
        return self.q // M

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.H // self.G

    @property
    def log2_scale(self) -> float:
        """Factor from a product of query and key to an exponent of 2."""
        return LOG2E * self.K**-0.5


def shape_of(
    q, k, bounds: Bounds, visits: Visits, blocks, interpret: bool, heads: int = 0
) -> KernelShape:
    """Return the static parameters of a call."""
    B, T, H, K = q.shape
    S, G = k.shape[1:3]
    count = lambda x: 0 if x is None else x.shape[1]  # noqa: E731
    return KernelShape(
        *(B, T + padding(T, blocks.q), S + padding(S, blocks.kv), H, G, K, q.dtype),
        *(blocks.q, blocks.kv, blocks.stages),
        *(bounds.in_order, count(bounds.queries), count(bounds.keys)),
        *(bounds.has_low, bounds.has_segments),
        *(visits.ranges is not None, visits.order is not None, interpret),
        heads,
    )


def named(s: KernelShape, names: list[str], refs) -> Refs:
    """Name the kernel's operands. The mask's operands, if any, replace "mask" in `names`."""
    mask = dict(rows=s.rows, cols=s.cols, ranges=s.ranged, order=s.listed)
    at = names.index("mask")
    names = names[:at] + [name for name, there in mask.items() if there] + names[at + 1 :]
    return Refs(**dict(zip(names, refs, strict=True)))


def compiler() -> plgpu.CompilerParams:
    """Return compiler parameters with `approx_math`: exp2 on the special function unit."""
    return plgpu.CompilerParams(approx_math=True)


def varying_as(x, other):
    """Cast `x` to a type that varies over the same mesh axes as `other`.

    The results of a kernel, and new references, have types that are invariant over all mesh axes,
    which is wrong under `shard_map`.
    """
    axes = jax.typeof(other).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def smem(shape, dtype, swizzle: int = 128):
    """Return shared memory in the swizzle, of 128 bytes, that TMA writes and wgmma reads.

    Args:     swizzle: for rows shorter than 128 bytes, their length.
    """
    # Type checkers consider both transforms abstract, but they can be instantiated.
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    swizzled = plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzled))


def accumulators(s: KernelShape, r: Refs, wg, body, count: int):
    """Call `body(*accumulators)` with `count` zeroed float32 accumulators [M, K]."""
    if not s.interpret:
        return pl.run_scoped(body, *(plgpu.ACC((M, s.K), f32),) * count)
    accs = [r.acc.at[i, wg] for i in range(count)]
    for acc in accs:
        acc[...] = jnp.zeros((M, s.K), f32)
    return body(*accs)


def interpreter_scratch(s: KernelShape, consumers: int, columns: int) -> dict[str, Any]:
    """Return shared memory that replaces registers in the interpreter."""
    if not s.interpret:
        return {}
    a = smem((consumers, M, columns), s.dtype)
    return dict(acc=plgpu.SMEM((2, consumers, M, s.K), f32), a=a)


def multiply(s: KernelShape, r: Refs, wg, acc, a, b) -> None:
    """Start acc += a @ b. Reading `acc` or calling `plgpu.wgmma_wait` waits for it.

    Args:     a: [64, k] in registers. b: [k, n] in shared memory.
    """
    if not s.interpret:
        plgpu.wgmma(acc, a, b)
        return
    spare = r.a.at[wg]
    spare[...] = a
    plgpu.commit_smem()

    def fresh(ref):
        plgpu.wgmma(ref, spare, b)
        return ref[...]

    acc[...] = acc[...] + pl.run_scoped(fresh, plgpu.ACC(acc.shape, f32))


def held(s: KernelShape, ref):
    """Load a left operand of many multiplications into registers.

    Returns:  registers [64, k]; in the interpreter `ref` itself, which must not change during use.
    """
    return ref if s.interpret else plgpu.load(ref, layout=TILE)


def transposed(ref):
    """Transpose a tile at no cost."""
    return ref.transpose((1, 0))


def spread(vector, shape, axis: int):
    """Broadcast a value per row (axis 0) or per column (axis 1) over a tile."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def iota(shape, axis: int):
    """Return the row or column indices of a tile."""
    return plgpu.broadcasted_iota(i32, shape, axis, layout=TILE)


def cdiv(a, b: int):
    """Divide an int32, rounding up."""
    return lax.div(a + (b - 1), i32(b))


def mod(a, n: int):
    """Return the remainder of a non-negative int32."""
    return lax.rem(a, i32(n))
