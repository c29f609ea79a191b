"""Attention kernels for Hopper GPUs, in Pallas (Mosaic GPU).

This module pads inputs to full tiles and selects the kernels. `tiles.py` converts masks to lists of
tiles. The kernels are in `forward.py`, `backward.py` and `dq.py`.
"""

import jax
import jax.numpy as jnp

from jaxpar.kernels.attention.hopper import backward as pallas_hopper_backward
from jaxpar.kernels.attention.hopper import dq
from jaxpar.kernels.attention.hopper import forward as pallas_hopper_forward
from jaxpar.kernels.attention.hopper.blocks import (
    BackwardBlocks,
    ForwardBlocks,
    default_backward,
    default_forward,
    dq_blocks,
)
from jaxpar.kernels.attention.hopper.mma import LOG2E
from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.kernels.attention.sinks import delta
from jaxpar.kernels.attention.tiles import (
    MULTIPROCESSORS,
    bounds_of,
    key_visits,
    padding,
    query_visits,
)

#: Number of CTAs of the forward: four per multiprocessor. One per multiprocessor is as fast without
#: communication. But if NCCL occupies some multiprocessors, their CTAs would wait until it ends and
#: then do a full share of the work while the others idle
#: (docs/experiments.md#persistent-ctas).
CTAS = 4 * MULTIPROCESSORS


def forward(
    q, k, v, mask: AttentionMask, *, blocks: ForwardBlocks | None = None, interpret: bool = False
):
    """`reference.forward` for bfloat16 or float16, and head dims 64, 128 and 256."""
    T, K = q.shape[1], q.shape[3]
    blocks = blocks or default_forward(K)
    more_q, more_k = padding(T, blocks.q), padding(k.shape[1], blocks.kv)
    bounds = bounds_of(mask, more_q, more_k)
    visits = query_visits(bounds, blocks.q, blocks.kv, k.shape[1] + more_k)
    (q,), (k, v) = _ready(more_q, interpret, q), _ready(more_k, interpret, k, v)
    ctas = 2 if interpret else CTAS
    out, lse = pallas_hopper_forward.forward(q, k, v, bounds, visits, blocks, ctas, interpret)
    return out[:, :T], lse[:, :, :T]


def backward(
    q,
    k,
    v,
    mask: AttentionMask,
    out,
    lse,
    d_out,
    d_lse,
    *,
    blocks: BackwardBlocks | None = None,
    deterministic: bool = False,
    interpret: bool = False,
):
    """`reference.backward` for the inputs that `forward` supports.

    Args:     lse, d_lse: float32 [B, H, T]. `lse` may include keys that are not in `k`, as in ring
              attention. deterministic: compute a result that is reproducible bit for bit, with
              seven multiplications instead of five. This is slower except on short documents. Head
              dim 256 is always deterministic.
    """
    T, S, K = q.shape[1], k.shape[1], q.shape[3]
    blocks, of_dq = blocks or default_backward(K), dq_blocks(K)
    more_q, more_k = padding(T, max(blocks.q, of_dq.q)), padding(S, max(blocks.kv, of_dq.kv))
    bounds = bounds_of(mask, more_q, more_k)
    lse2, deltas = lse * LOG2E, delta(out, d_out, d_lse)
    (q, d_out), (k, v) = _ready(more_q, interpret, q, d_out), _ready(more_k, interpret, k, v)
    lse2, deltas = (_padded_rows(x, more_q) for x in (lse2, deltas))
    operands = q, k, v, d_out, lse2, deltas, bounds
    visits = key_visits(bounds, blocks.q, blocks.kv, T + more_q, S + more_k)
    run = lambda *want: pallas_hopper_backward.backward(  # noqa: E731
        *operands, visits, blocks, want, interpret
    )
    if not deterministic and K < 256:
        made = run("dq", "dk", "dv")
        made["dq"] = (made["dq"] * K**-0.5).astype(q.dtype)
    else:
        made = run("dk", "dv") if K < 256 else run("dk") | run("dv")
        rows = query_visits(bounds, of_dq.q, of_dq.kv, S + more_k)
        made["dq"] = dq.query_gradient(*operands, rows, of_dq, interpret)
    return made["dq"][:, :T], made["dk"][:, :S], made["dv"][:, :S]


def _ready(to_whole_tiles: int, interpret: bool, *arrays) -> list[jax.Array]:
    """Pad arrays of [B, T, H, K] to a multiple of 8 rows, the tile size of the copy engine (TMA).

    TMA handles the end of an array. The interpreter does not, so it needs full tiles.
    """
    rows = to_whole_tiles if interpret else padding(arrays[0].shape[1], 8)
    return [jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, 0))) if rows else x for x in arrays]


def _padded_rows(x, rows: int):
    return jnp.pad(x, ((0, 0), (0, 0), (0, rows))) if rows else x
