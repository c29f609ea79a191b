"""The largest attention score of each head, exactly, whatever kernel computes attention.

Kernels return the log-sum-exp of a row, not its maximum. The scores are therefore computed a second
time, without a gradient: half of attention's forward FLOPs, in a kernel that keeps only the
maximum of a query. Where there is none, XLA writes the scores of some queries at a time.

They leave a layer through a probe (`model/probes.py`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention import AttentionMask
from jaxpar.kernels.attention.capability import CAPABILITIES, make_request, refusal
from jaxpar.kernels.attention.mask import dense_mask
from jaxpar.kernels.platform import Platform
from jaxpar.parallel.collectives import all_gather, share, varying
from jaxpar.sharding.axes import SEQUENCE

#: Queries whose scores are in memory at the same time.
QUERIES = 256

#: The logit of a key that a query does not see.
UNSEEN = -1e30


def by_kernel(dtype: str, head_dim: int) -> bool:
    """Return whether GPUs since Ampere have a kernel for these queries."""
    able = CAPABILITIES["triton"]
    return dtype in able.dtypes and head_dim in (able.head_dims or ())


def across(
    q: jax.Array, k: jax.Array, mask: AttentionMask
) -> tuple[jax.Array, jax.Array, AttentionMask]:
    """Return this device's queries, the keys of the complete sequence, and the mask of both.

    Args:     mask: with the keys of the complete sequence or of this device, as `mask_across`
              returns it; under `ulysses` with all queries too.
    """
    if lax.axis_size(SEQUENCE) == 1:
        return q, k, mask
    if mask.kv_positions.shape[1] == k.shape[1]:
        gathered = lambda a: None if a is None else all_gather(a, SEQUENCE, 1)  # noqa: E731
        mask = dataclasses.replace(
            mask,
            kv_positions=gathered(mask.kv_positions),
            kv_segments=gathered(mask.kv_segments),
        )
    if mask.q_positions.shape[1] != q.shape[1]:
        own = lambda a: None if a is None else share(a, SEQUENCE, 1)  # noqa: E731
        mask = dataclasses.replace(
            mask, q_positions=own(mask.q_positions), q_segments=own(mask.q_segments)
        )
    return q, all_gather(k, SEQUENCE, 1), mask


@jax.named_scope("largest_logits")
def largest(q: jax.Array, k: jax.Array, mask: AttentionMask) -> jax.Array:
    """Compute the largest visible score of each row and head: float32 [B, H]."""
    B, T, H, K = q.shape
    if refusal("triton", make_request("forward", q, k, mask, Platform.here())) is None:
        from jaxpar.kernels.attention.triton import api as triton

        return jnp.max(triton.largest(q, k, mask), axis=2) * K**-0.5
    G = k.shape[2]
    size = next(n for n in range(min(QUERIES, T), 0, -1) if T % n == 0)
    cut = lambda a: jnp.moveaxis(a.reshape(B, T // size, size, *a.shape[2:]), 1, 0)  # noqa: E731
    segments = mask.q_segments
    parts = cut(q), cut(mask.q_positions), None if segments is None else cut(segments)

    def of_queries(most: jax.Array, part: Any) -> tuple[jax.Array, None]:
        q, positions, segments = part
        of_part = dataclasses.replace(mask, q_positions=positions, q_segments=segments)
        grouped = q.reshape(B, size, G, H // G, K)
        scores = jnp.einsum("btgrk,bsgk->bgrts", grouped, k, preferred_element_type=jnp.float32)
        seen = dense_mask(of_part)[:, None, None]
        of_head = jnp.max(jnp.where(seen, scores, UNSEEN), axis=(3, 4)).reshape(B, H)
        return jnp.maximum(most, of_head), None

    start = varying(jnp.full((B, H), UNSEEN, jnp.float32))
    return lax.scan(of_queries, start, parts)[0] * K**-0.5
