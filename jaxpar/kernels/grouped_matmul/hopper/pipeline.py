"""What the products share: a producer of tiles, two consumers on wgmma, and stores by TMA.

A CTA has three warpgroups. The producer copies tiles of both operands into a ring of buffers. Each
consumer multiplies half of the rows of a tile and stores its half of the result. The CTAs are
persistent: one per multiprocessor, each with every n-th tile of the result.

Pallas' interpreter does not support accumulators that live longer than one multiplication.
`accumulate` and `multiply` therefore have two implementations, as attention's do.
"""

from dataclasses import dataclass
from types import SimpleNamespace as Refs

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.mma import compiler, mod, smem, spread, varying_as
from jaxpar.kernels.attention.tiles import MULTIPROCESSORS

f32, i32 = jnp.float32, jnp.int32

#: Warpgroups that multiply. The last warpgroup is the producer.
CONSUMERS = 2
#: Rows that one wgmma instruction multiplies.
M = 64
#: Width of a step through the dimension that is summed over, for 16 bits: 128 bytes, the swizzle.
STEP = 64
#: Rows of a tile of the result, and its possible widths. 128 x 256 was the fastest: 256 x 128 is up
#: to 12% slower.
ROWS, WIDTHS = 128, (256, 192, 128)
#: Buffers of the ring. Four of 128 x 64 and 64 x 256 bfloat16 take 196 of 227 KiB.
STAGES = 4
#: Pieces of the result that are stored while the next is written.
SLOTS = 2
#: Tiles of rows that are neighbors in the order of work, so that they share tiles of the weights in
#: the L2 cache.
NEIGHBORS = 4


@dataclass(frozen=True)
class Launch:
    """How a kernel runs. Tests interpret it with few CTAs."""

    ctas: int = MULTIPROCESSORS
    interpret: bool = False


#: One CTA per multiprocessor.
DEFAULT = Launch()


def width_of(columns: int) -> int:
    """Return the width of a tile of the result: the one that pads columns least, then the widest.

    Past the last column, TMA reads zeros and writes nothing.
    """
    return min(WIDTHS, key=lambda width: (-columns % width, -width))


def tiles_across(columns: int) -> int:
    """Return the number of tiles of the result side by side."""
    return -(-columns // width_of(columns))


def div(a, n):
    """Divide a non-negative int32, rounding down."""
    return lax.div(a, i32(n))


def place(work, row_tiles, column_tiles: int, neighbors: int = NEIGHBORS):
    """Return the tile of rows and the tile of columns of a work item.

    `neighbors` tiles of rows go through all columns together. The last group may be smaller.

    Args:     work: int32 scalar below row_tiles * column_tiles. row_tiles: int32 scalar.
    """
    group = div(work, neighbors * column_tiles)
    first = group * neighbors
    rest = work - group * (neighbors * column_tiles)
    side_by_side = jnp.minimum(row_tiles - first, neighbors)
    return first + lax.rem(rest, side_by_side), lax.div(rest, side_by_side)


def scratch(a: tuple[int, int], b: tuple[int, int], width: int, dtypes, out_dtype, interpret: bool):
    """Return a CTA's shared memory and barriers.

    Args:     a, b: shapes of a tile of each operand. width: of a tile of the result. dtypes: of the
              operands.
    """
    barrier = lambda: plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)  # noqa: E731
    refs = dict(
        a=smem((STAGES, *a), dtypes[0]),
        b=smem((STAGES, *b), dtypes[1]),
        pieces=smem((CONSUMERS, SLOTS, M, columns_at_a_time(out_dtype)), out_dtype),
        full=barrier(),
        free=barrier(),
    )
    if interpret:
        refs["acc"] = plgpu.SMEM((CONSUMERS, ROWS // CONSUMERS, width), f32)
    return refs


def columns_at_a_time(dtype) -> int:
    """Return the width of 128 bytes: of a piece of the result, and of a step through operands."""
    return 128 // jnp.dtype(dtype).itemsize


def call(kernel, out_type, scratch_types, ctas: int, *operands):
    """Call a kernel of three warpgroups, and give its result the type of its operands."""
    out = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=compiler(),
    )(*operands)
    of_any = lambda x: [x := varying_as(x, other) for other in operands][-1]  # noqa: E731
    return tuple(map(of_any, out)) if isinstance(out, (list, tuple)) else of_any(out)


def roles(producer, consumer) -> None:
    """Run `producer()` on the last warpgroup and `consumer(warpgroup)` on the others."""
    wg = lax.axis_index("warpgroup")

    @pl.when(wg == CONSUMERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        producer()

    @pl.when(wg < CONSUMERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        consumer(wg)
        plgpu.wait_smem_to_gmem(0)


def load(r: Refs, count, a, b) -> None:
    """Copy two tiles into the ring as its `count`-th entry, once their buffers are free."""
    slot = mod(count, STAGES)
    pl.when(count >= STAGES)(lambda: plgpu.barrier_wait(r.free.at[slot]))
    plgpu.copy_gmem_to_smem(a, r.a.at[slot], r.full.at[slot])
    plgpu.copy_gmem_to_smem(b, r.b.at[slot], r.full.at[slot])


def drain(r: Refs, count, launch: Launch) -> None:
    """Wait until the last of `count` entries are free, as the interpreter requires."""
    if launch.interpret:

        def see(i, _):
            plgpu.barrier_wait(r.free.at[mod(i, STAGES)])

        lax.fori_loop(jnp.maximum(count - STAGES, 0), count, see, None)


def accumulate(r: Refs, wg, first, steps, operands, store, width: int, launch: Launch) -> None:
    """Multiply `steps` entries of the ring, from the `first` one, and store the sum.

    Args:     operands: slot -> this consumer's two operands. store: the accumulator -> None.
    """
    shape = (ROWS // CONSUMERS, width)

    def whole(acc):
        def step(k, _):
            slot = mod(first + k, STAGES)
            plgpu.barrier_wait(r.full.at[slot])
            a, b = operands(slot)
            _multiply(acc, a, b, launch)
            plgpu.wgmma_wait(1)  # the previous product, whose buffers are now free
            before = mod(first + k + STAGES - 1, STAGES)
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(r.free.at[before]))

        lax.fori_loop(0, steps, step, None)
        plgpu.wgmma_wait(0)
        last = mod(first + steps + STAGES - 1, STAGES)
        pl.when(steps > 0)(lambda: plgpu.barrier_arrive(r.free.at[last]))
        store(acc)

    if not launch.interpret:
        pl.run_scoped(whole, plgpu.ACC(shape, f32))
        return
    acc = r.acc.at[wg]
    acc[...] = jnp.zeros(shape, f32)
    whole(acc)


def _multiply(acc, a, b, launch: Launch) -> None:
    """Start acc += a @ b."""
    if not launch.interpret:
        plgpu.wgmma(acc, a, b)
        return

    def fresh(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    acc[...] = acc[...] + pl.run_scoped(fresh, plgpu.ACC(acc.shape, f32))


def store(r: Refs, wg, acc, at, scale=None) -> None:
    """Store a consumer's accumulator, [64, width], a piece at a time.

    Args:     at: first column of a piece -> the piece in global memory. scale: float32 [64] in the
              layout of rows, which multiplies them; or None.
    """
    values, (_, width) = acc[...], acc.shape
    if scale is not None:
        values = values * spread(scale, values.shape, 0)
    columns = r.pieces.shape[-1]
    # Buffers are used in turn, from the first one for each tile.
    in_turn = width // columns % SLOTS == 0
    for i, first in enumerate(range(0, width, columns)):
        piece = r.pieces.at[wg, i % SLOTS]
        stored_later = 0 if i == 0 and not in_turn else SLOTS - 1
        plgpu.wait_smem_to_gmem(stored_later, wait_read_only=True)
        piece[...] = values[:, first : first + columns].astype(piece.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(piece, at(first))


def pieces_here(ctas: int, total):
    """Return the number of this CTA's work items, and a function from its i-th to the item."""
    cta = lax.axis_index("cta")
    return div(total - cta + (ctas - 1), ctas), lambda i: cta + i * ctas
