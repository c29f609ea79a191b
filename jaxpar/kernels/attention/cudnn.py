"""Attention by cuDNN's fused kernels, with a float32 log-sum-exp and packed documents.

The public function of `jax.nn` rounds the log-sum-exp to bfloat16 and drops its cotangent, so this
module calls JAX's private cuDNN primitives. (The JAX version is bounded in pyproject.toml, and the
`gpu` tests run them.) A boolean mask would become a dense T x S bias, so documents are passed as
offsets instead.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.jax_private.table import CUDNN_ATTENTION
from jaxpar.kernels.attention.mask import AttentionMask

fused = CUDNN_ATTENTION.load()


def forward(q, k, v, mask: AttentionMask) -> tuple[jax.Array, jax.Array]:
    """`reference.forward` for bfloat16 or float16, with tokens in text order."""
    segments, params = _request(q, k, mask)
    fused.check_cudnn_version()
    unused = jnp.zeros(0, q.dtype)
    out, stats = fused._dot_product_attention_fwd_p_wrapper.bind(
        q, k, v, unused, *segments.operands(), unused, unused, is_training=True, **params
    )
    return out, segments.rows_of(stats)


def backward(q, k, v, mask: AttentionMask, out, lse, d_out, d_lse):
    """`reference.backward`, except that `d_lse` is not read: `api.attention` raises an error."""
    del d_lse
    segments, params = _request(q, k, mask)
    unused = jnp.zeros(0, q.dtype)
    stats = segments.stats_of(lse)
    return tuple(
        fused._dot_product_attention_bwd_p_wrapper.bind(
            q, k, v, unused, *segments.operands(), unused, unused, stats, out, d_out, **params
        )
    )


def _request(q, k, mask: AttentionMask):
    packed = mask.q_segments is not None
    kind = fused.MaskType.PADDING_CAUSAL if packed else fused.MaskType.CAUSAL
    params = dict(
        scale=q.shape[-1] ** -0.5,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=kind,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=mask.window,
    )
    return (_Packed(q.dtype, mask) if packed else _Whole(q.dtype)), params


class _Whole:
    """One segment per row: cuDNN's statistics are the log-sum-exp, [B, H, T]."""

    def __init__(self, dtype):
        self.dtype = dtype

    def operands(self):
        return (jnp.zeros(0, self.dtype),) * 4

    def rows_of(self, stats):
        return stats

    def stats_of(self, lse):
        return lse


class _Packed:
    """Documents given by length and offset, which cuDNN numbers consecutively over the batch.

    cuDNN's statistics are [B * max_segments, H, T], with one row per document that starts at the
    document's first token. Ours are [B, H, T], so a token's index in cuDNN's is (document,
    position).
    """

    def __init__(self, dtype, mask: AttentionMask):
        del dtype
        assert mask.max_segments is not None
        B, T = mask.q_segments.shape
        M = self.max_segments = mask.max_segments
        number = mask.q_segments - 1
        self.lengths = jax.vmap(partial(jnp.bincount, length=M))(number).astype(jnp.int32)
        ends = jnp.cumsum(self.lengths, axis=1)
        starts = ends - self.lengths
        used = self.lengths > 0
        before = jnp.cumsum(used.sum(1)) - used.sum(1)
        self.document = before[:, None] + number
        self.position = jnp.arange(T)[None] - jnp.take_along_axis(starts, number, axis=1)
        self.lengths = jnp.where(used, self.lengths, -1)
        last = jnp.full((B, 1), -1, jnp.int32)
        self.offsets = jnp.concatenate([jnp.where(used, starts, -1), last], 1).astype(jnp.int32)

    def operands(self):
        return self.lengths, self.lengths, self.offsets, self.offsets

    def rows_of(self, stats):
        return jnp.transpose(stats, (0, 2, 1))[self.document, self.position].transpose(0, 2, 1)

    def stats_of(self, lse):
        B, H, T = lse.shape
        empty = jnp.zeros((B * self.max_segments, T, H), jnp.float32)
        stats = empty.at[self.document, self.position].set(lse.transpose(0, 2, 1))
        return stats.transpose(0, 2, 1)
