"""Attention kernels for NVIDIA GPUs since Ampere, in Pallas (Triton).

This module pads inputs to full tiles and selects the block sizes. The kernels are in `forward.py`,
`backward.py` and `largest.py`. On Hopper, cuDNN and `kernels/attention/hopper/` are faster.
"""

import functools

import jax
import jax.numpy as jnp

from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.kernels.attention.sinks import delta
from jaxpar.kernels.attention.tiles import bounds_of, key_visits, padding, query_visits
from jaxpar.kernels.attention.triton import backward as backward_kernels
from jaxpar.kernels.attention.triton import forward as forward_kernel
from jaxpar.kernels.attention.triton import largest as largest_kernel
from jaxpar.kernels.attention.triton.blocks import (
    TritonBackward,
    TritonForward,
    default_backward,
    default_forward,
)
from jaxpar.kernels.attention.triton.shape import LOG2E
from jaxpar.kernels.platform import Platform


def forward(
    q,
    k,
    v,
    mask: AttentionMask,
    *,
    blocks: TritonForward | None = None,
    softcap: float | None = None,
    interpret: bool = False,
):
    """`reference.forward` for bfloat16 or float16, and head dims that are multiples of 16."""
    blocks = blocks or default_forward(q.shape[3], Platform.here().compute_capability)
    return _forward(q, k, v, mask, blocks, softcap, interpret)


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
    blocks: TritonBackward | None = None,
    softcap: float | None = None,
    interpret: bool = False,
):
    """`reference.backward` for the inputs that `forward` supports, reproducible bit for bit.

    Args:     lse, d_lse: float32 [B, H, T]. `lse` may include keys that are not in `k`, as in ring
              attention.
    """
    blocks = blocks or default_backward(q.shape[3], Platform.here().compute_capability)
    return _backward(q, k, v, mask, out, lse, d_out, d_lse, blocks, softcap, interpret)


def largest(
    q, k, mask: AttentionMask, *, blocks: TritonForward | None = None, interpret: bool = False
) -> jax.Array:
    """Compute the largest product of each query and a key that it sees: float32 [B, H, T].

    Args:     as `forward`.
    """
    blocks = blocks or default_forward(q.shape[3], Platform.here().compute_capability)
    return _largest(q, k, mask, blocks, interpret)


# Inside a jit for the reason in `kernels/float8/rounding.py`: JAX would keep a bare
# pallas_call.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _largest(q, k, mask, blocks: TritonForward, interpret: bool):
    T, S = q.shape[1], k.shape[1]
    more_q, more_k = padding(T, blocks.q), padding(S, blocks.kv)
    bounds = bounds_of(mask, more_q, more_k)
    visits = query_visits(bounds, blocks.q, blocks.kv, S + more_k)
    q, k = _padded(q, more_q), _padded(k, more_k)
    return largest_kernel.largest(q, k, bounds, visits, blocks, interpret)[:, :, :T]


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _forward(q, k, v, mask, blocks: TritonForward, softcap: float | None, interpret: bool):
    T, S = q.shape[1], k.shape[1]
    more_q, more_k = padding(T, blocks.q), padding(S, blocks.kv)
    bounds = bounds_of(mask, more_q, more_k)
    visits = query_visits(bounds, blocks.q, blocks.kv, S + more_k)
    q, k, v = _padded(q, more_q), _padded(k, more_k), _padded(v, more_k)
    how = softcap, interpret
    out, lse = forward_kernel.forward(q, k, v, bounds, visits, blocks, *how)
    return out[:, :T], lse[:, :, :T]


@functools.partial(jax.jit, static_argnums=(8, 9, 10))
def _backward(
    q,
    k,
    v,
    mask,
    out,
    lse,
    d_out,
    d_lse,
    blocks: TritonBackward,
    softcap: float | None,
    interpret: bool,
):
    T, S = q.shape[1], k.shape[1]
    more_q = padding(T, max(blocks.q, blocks.dq_q))
    more_k = padding(S, max(blocks.kv, blocks.dq_kv))
    bounds = bounds_of(mask, more_q, more_k)
    by_key = key_visits(bounds, blocks.q, blocks.kv, T + more_q, S + more_k)
    by_query = query_visits(bounds, blocks.dq_q, blocks.dq_kv, S + more_k)
    per_row = (_padded(x, more_q, axis=2) for x in (lse * LOG2E, delta(out, d_out, d_lse)))
    arrays = (q, more_q), (k, more_k), (v, more_k), (d_out, more_q)
    operands = [*(_padded(x, more) for x, more in arrays), *per_row]
    how = blocks, softcap, interpret
    dk, dv = backward_kernels.key_gradients(operands, bounds, by_key, *how)
    dq = backward_kernels.query_gradient(operands, bounds, by_query, *how)
    return dq[:, :T], dk[:, :S], dv[:, :S]


def _padded(x, more: int, axis: int = 1):
    widths = [(0, more if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths) if more else x
