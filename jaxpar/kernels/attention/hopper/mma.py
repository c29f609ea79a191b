"""What the Hopper kernels share: matrix multiplications, shared memory, operands by name.

Pallas' interpreter, which checks barriers and races on a CPU, knows neither accumulators that
live longer than one multiplication nor operands in registers. So `multiply`, `accumulators` and
`held` do the same thing in two ways, and the kernels above them are one program in both.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.tiles import Bounds, Visits, padding

LOG2E = math.log2(math.e)
#: Rows that one warpgroup multiplies at a time.
M = 64
#: Of an H100 or H200 module.
MULTIPROCESSORS = 132
#: Share of them that are enough: powers of two of tiles make 128.
NEARLY = 0.95
#: Registers of an accumulator, of one value per row of it, and of one per column.
TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
f32, i32 = jnp.float32, jnp.int32


@dataclass(frozen=True)
class KernelShape:
    """What a kernel is compiled for. `rows` and `cols` count the mask's bounds.

    T and S are whole tiles. Operands [B, T, H, K] may end before: past their end, TMA reads zeros
    and writes nothing. (Only interpreted must they be whole.) One row of numbers, though, is
    copied without regard to where it ends: what is [B, H, T] must be whole.
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
        """Warpgroups of a kernel whose consumers share the queries of a tile."""
        return self.q // M

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.H // self.G

    @property
    def log2_scale(self) -> float:
        """From a product of query and key to the exponent of 2."""
        return LOG2E * self.K**-0.5


def shape_of(
    q, k, bounds: Bounds, visits: Visits, blocks, interpret: bool, heads: int = 0
) -> KernelShape:
    """The static facts of a call."""
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


def lanes_at_a_time(tiles: int, lanes: int, wanted: int) -> int:
    """How many lanes' tiles to work on before the others': as many as are wanted, but enough that
    nearly each multiprocessor has a tile, and a divisor of all of them. With fewer, the last lanes'
    long tiles would begin when the rest is nearly done.

    Args:     tiles: of a lane. lanes: rows times heads. wanted: 0: all.
    """
    fewest = max(wanted, math.ceil(NEARLY * MULTIPROCESSORS / tiles)) if wanted else lanes
    return next(n for n in range(1, lanes + 1) if lanes % n == 0 and n >= min(fewest, lanes))


def tile_and_lane(work, tiles: int, lanes: int, at_a_time: int):
    """The tile, and the row and head, of a CTA's n-th piece of work: neighbors share a tile.

    Args:     work: int32 scalar below tiles * lanes. lanes: rows times heads.
              at_a_time: lanes whose tiles come before all other lanes'; if that does not divide
              them, its greatest divisor that does. 0: all of them.
    Returns:  int32 scalars.
    """
    side_by_side = math.gcd(lanes, at_a_time)
    if side_by_side == lanes:
        return lax.div(work, i32(lanes)), mod(work, lanes)
    these, rest = lax.div(work, i32(tiles * side_by_side)), mod(work, tiles * side_by_side)
    lane = these * side_by_side + mod(rest, side_by_side)
    return lax.div(rest, i32(side_by_side)), lane


def optional_operands(bounds: Bounds, visits: Visits) -> list[Any]:
    """Of the mask, what there is; `named` takes it up."""
    every = (bounds.queries, bounds.keys, visits.ranges, visits.order)
    return [x for x in every if x is not None]


class Refs:
    """References by name."""

    def __init__(self, **refs: Any):
        self.__dict__.update(refs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this kernel has no {name}")


def named(s: KernelShape, names: list[str], refs) -> Refs:
    """The kernel's operands by name: `names`, with the mask's, where there are any, at "mask"."""
    mask = dict(rows=s.rows, cols=s.cols, ranges=s.ranged, order=s.listed)
    at = names.index("mask")
    names = names[:at] + [name for name, there in mask.items() if there] + names[at + 1 :]
    return Refs(**dict(zip(names, refs, strict=True)))


def compiler() -> plgpu.CompilerParams:
    """`approx_math`: exp2 by the special function unit."""
    return plgpu.CompilerParams(approx_math=True)


def varying_as(x, other):
    """`x`, typed as varying over the same mesh axes as `other`.

    A kernel's results and a new reference are typed as the same on every device, whatever they
    come from; under `shard_map` that would be wrong.
    """
    axes = jax.typeof(other).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def smem(shape, dtype):
    """Shared memory in the 128-byte swizzle that TMA writes and wgmma reads."""
    # type: the two are abstract in name only.
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def accumulators(s: KernelShape, r: Refs, wg, body, count: int):
    """`body(*accumulators)` with `count` zeroed float32 accumulators [M, K]."""
    if not s.interpret:
        return pl.run_scoped(body, *(plgpu.ACC((M, s.K), f32),) * count)
    accs = [r.acc.at[i, wg] for i in range(count)]
    for acc in accs:
        acc[...] = jnp.zeros((M, s.K), f32)
    return body(*accs)


def interpreter_scratch(s: KernelShape, consumers: int, columns: int) -> dict[str, Any]:
    """Shared memory in the place of registers."""
    if not s.interpret:
        return {}
    a = smem((consumers, M, columns), s.dtype)
    return dict(acc=plgpu.SMEM((2, consumers, M, s.K), f32), a=a)


def multiply(s: KernelShape, r: Refs, wg, acc, a, b) -> None:
    """acc += a @ b, begun; reading `acc` or `plgpu.wgmma_wait` ends it.

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
    """A left operand of many multiplications, which then need not read it from shared memory.

    Returns:  registers [64, k]; in the interpreter `ref` itself, which must not change meanwhile.
    """
    return ref if s.interpret else plgpu.load(ref, layout=TILE)


def transposed(ref):
    """A tile's other face; costs nothing."""
    return ref.transpose((1, 0))


def spread(vector, shape, axis: int):
    """A value per row (axis 0) or per column (axis 1) over a whole tile."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def iota(shape, axis: int):
    """Row or column numbers of a tile."""
    return plgpu.broadcasted_iota(i32, shape, axis, layout=TILE)


def cdiv(a, b: int):
    """Ceiling division of int32."""
    return lax.div(a + (b - 1), i32(b))


def mod(a, n: int):
    """Remainder of a non-negative int32."""
    return lax.rem(a, i32(n))
