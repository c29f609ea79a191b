"""The passes over rows of logits for GPUs since Hopper (Mosaic GPU): a warpgroup for each row.

`kernels/softmax.py` calls them. A row is read in blocks, the next one in transit while a block is
added. The last block ends with the row: it may begin within the block before, and
leaves what that one has written.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.jax_private.table import CONFIG, MPMD
from jaxpar.kernels.attention.hopper.mma import varying_as

# ---------------------------------------- A kernel for Mosaic GPU that overwrites its first operand
#
# JAX's public entry, `plgpu.kernel`, overwrites references alone, and JAX 0.11.2 refuses references
# to arrays that vary over the axes of a `jax.shard_map`: "mpmd_map does not support Refs with
# varying manual axis types".


def overwriting(
    body: Callable[..., None],
    x: jax.Array,
    out_type: Sequence[jax.ShapeDtypeStruct],
    mesh: plgpu.Mesh,
    name: str,
    compiler_params: plgpu.CompilerParams,
) -> tuple[jax.Array, ...]:
    """Run a kernel whose first result takes the place of x.

    Args:     body: called with references to x, to the result in its place, and to `out_type`.
    Returns:  the result in x's place, and those of `out_type`.
    """
    varying = jax.typeof(x).manual_axis_type
    types = jax.ShapeDtypeStruct(x.shape, x.dtype), *out_type
    out_types = [jax.ShapeDtypeStruct(a.shape, a.dtype, manual_axis_type=varying) for a in types]
    made = MPMD.load()._mpmd_map(
        [(mesh, body)],
        out_types,
        input_output_aliases={0: 0},
        compiler_params=compiler_params,
        interpret=CONFIG.load().pallas_tpu_interpret_mode_context_manager.value or False,
        name=name,
    )(x)
    return tuple(made)


#: Threads of a warpgroup, and so the least columns of a block.
WARPGROUP = 128

#: Columns per block, for sums and for exponentials.
BLOCK, WRITTEN_BLOCK = 2048, 2048

#: Bytes that a thread reads at a time.
VECTOR_BYTES = 16

#: No thread reads what another one writes, except where the kernel waits for it.
COMPILER = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
THREAD = "warpgroup"

LOG2_E = 1.4426950408889634
f32, i32 = jnp.float32, jnp.int32
LOWEST = float(jnp.finfo(f32).min)  # not -inf: -inf - -inf is NaN


def base_and_sum(logits_NV, block: int, max_sum: float) -> tuple[jax.Array, jax.Array]:
    """`softmax.base_and_sum` for rows of at least `WARPGROUP` columns.

    The base is the largest logit of the first block, so later blocks need not wait for a maximum.
    If a later logit is so much larger that the sum exceeds `max_sum`, the row is read again, and
    the sum is rescaled at each new maximum.

    Source:   Milakov and Gimelshein 2018 (1805.02867): the maximum and the sum in one pass.
    """
    N, V = logits_NV.shape
    kernel = functools.partial(_sum_kernel, _fitting(block, V), max_sum)
    base, total = _call(kernel, N, _of_rows(N), "softmax_sum")(logits_NV)
    return varying_as(base, logits_NV), varying_as(total, logits_NV)


def exponentials(
    logits_NV, dtype: Any, block: int, leap: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`softmax.exponentials` for rows of at least `WARPGROUP` columns.

    The base is the largest logit of the first block. If the largest logit of a later block is more
    than `leap` above the base, it becomes the new base, and the exponentials written so far are
    rescaled. Overwrites the logits if the dtypes are equal.
    """
    N, V = logits_NV.shape
    kernel = functools.partial(_exponentials_kernel, _fitting(block, V), leap)
    name, of_rows = "softmax_exponentials", _of_rows(N)
    if logits_NV.dtype == dtype:
        mesh = plgpu.Mesh(grid=(N,), grid_names=("row",), num_threads=1, thread_name=THREAD)
        made = overwriting(kernel, logits_NV, of_rows, mesh, name, COMPILER)
    else:
        out_type = jax.ShapeDtypeStruct((N, V), dtype), *of_rows
        made = _call(kernel, N, out_type, name)(logits_NV)
    values, base, total = (varying_as(a, logits_NV) for a in made)
    return values, base, total


def _fitting(block: int, V: int) -> int:
    return min(block, V // WARPGROUP * WARPGROUP)


def _of_rows(rows: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    of_rows = jax.ShapeDtypeStruct((rows,), f32)
    return of_rows, of_rows


def _call(kernel, rows: int, out_type, name: str) -> Callable[..., Any]:
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(rows,),
        grid_names=("row",),
        num_threads=1,
        thread_name=THREAD,
        kernel_name=name,
        compiler_params=COMPILER,
    )


def _loads(ref, row, block: int, like) -> Callable[[Any], jax.Array]:
    """Return a function from a first column to a block of a row of `ref`.

    A thread has vectors of 16 bytes of `like`, where the block is large enough. All arrays of a
    kernel are in the same registers.
    """
    vector = VECTOR_BYTES // jnp.dtype(like.dtype).itemsize
    while block % (vector * WARPGROUP):
        vector //= 2
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=vector)
    return lambda start: plgpu.load(ref.at[row, pl.ds(start, block)], layout=layout)


def _blocks(V: int, block: int) -> tuple[int, int]:
    """Return the number of full blocks, and the columns of a last one after them."""
    return V // block, V % block


def _last(logits, block: int, fresh: int):
    """Return the mask of the last `fresh` columns of a block, and logits that are -inf before."""
    here = lax.broadcasted_iota(i32, (block,), 0) >= block - fresh
    return here, jnp.where(here, logits, -jnp.inf)


def _sum_kernel(block: int, max_sum: float, logits_ref, base_ref, sum_ref):
    row, V = lax.axis_index("row"), logits_ref.shape[1]
    blocks, rest = _blocks(V, block)
    logits_from = _loads(logits_ref, row, block, logits_ref)
    load = lambda i: logits_from(jnp.minimum(i * block, V - block))  # noqa: E731

    def through_blocks(add, base, first):
        def step(i, carry):
            base, sums, logits = carry
            following = load(i + 1)  # in transit while this one is added
            return *add(base, sums, logits.astype(f32)), following

        carry = lax.fori_loop(0, blocks, step, (base, jnp.zeros((block,), f32), first))
        base, sums, logits = carry
        if rest:
            base, sums = add(base, sums, _last(logits.astype(f32), block, rest)[1])
        total = jnp.sum(sums)
        base_ref[row], sum_ref[row] = base, total
        return total

    def add(base, sums, logits):
        return base, sums + _exp(logits - base)

    def add_and_scale(top, sums, logits):
        higher = jnp.maximum(top, jnp.max(logits))
        return higher, sums * _exp(top - higher) + _exp(logits - higher)

    first = load(i32(0))
    total = through_blocks(add, jnp.maximum(LOWEST, jnp.max(first.astype(f32))), first)

    @pl.when(jnp.logical_not(total < max_sum))  # true for NaN, too
    def _():
        through_blocks(add_and_scale, f32(LOWEST), load(i32(0)))


def _exponentials_kernel(block: int, leap: float, logits_ref, out_ref, base_ref, sum_ref):
    row, V = lax.axis_index("row"), logits_ref.shape[1]
    blocks, rest = _blocks(V, block)
    logits_from = _loads(logits_ref, row, block, logits_ref)
    load = lambda i: logits_from(jnp.minimum(i * block, V - block))  # noqa: E731

    written_from = _loads(out_ref, row, block, logits_ref)

    def scale_written(end, factor):
        """Scale the blocks before `end`."""

        def scale(i, _):
            scaled = written_from(i * block).astype(f32) * factor
            out_ref[row, pl.ds(i * block, block)] = scaled.astype(out_ref.dtype)

        lax.fori_loop(0, end, scale, None)

    def exponentials(i, base, sums, logits):
        """Return the new base, sums and exponentials, with what was written before scaled."""
        # The maximum synchronizes all warps.
        top = jnp.max(logits)
        leaps = top > base + leap
        higher = jnp.where(leaps, top, base)
        shrink = _exp(base - higher)
        pl.when(leaps)(lambda: scale_written(i, shrink))
        values = _exp(logits - higher)
        return higher, sums * shrink + values, values.astype(out_ref.dtype)

    def step(i, carry):
        base, sums, logits = carry
        following = load(i + 1)  # in transit while this one is added
        base, sums, values = exponentials(i, base, sums, logits.astype(f32))
        out_ref[row, pl.ds(i * block, block)] = values
        return base, sums, following

    first = load(i32(0))
    start = jnp.maximum(LOWEST, jnp.max(first.astype(f32))), jnp.zeros((block,), f32), first
    base, sums, logits = lax.fori_loop(0, blocks, step, start)
    if rest:
        here, logits = _last(logits.astype(f32), block, rest)
        base, sums, values = exponentials(i32(blocks), base, sums, logits)
        plgpu.commit_smem()  # other threads have written, and scaled, the columns before
        before = written_from(V - block)
        out_ref[row, pl.ds(V - block, block)] = jnp.where(here, values, before)
    base_ref[row], sum_ref[row] = base, jnp.sum(sums)


def _exp(x):
    return jnp.exp2(x * LOG2_E)
