"""The attention mask: which keys a query attends to, in one form for all backends."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class AttentionMask:
    """Causal attention within documents, at any positions, with an optional sliding window.

    A query attends to a key if both are in the same segment, the key's position is not after the
    query's, and it is less than `window` before it. Positions may be in any order (zigzag), and
    query and key lengths may differ.

    q_positions   int32 [B, T].
    kv_positions  int32 [B, S].
    q_segments    int32 [B, T], or None for a single segment.
    kv_segments   int32 [B, S], or None.
    window        Static. None means no limit.
    max_segments  Static. Maximum number of segments in a row, for backends that use offsets.
    in_order      Static. True promises T = S and text order: positions increase by one within a
                  segment, and segments are contiguous and numbered from 1 in each row (cuDNN's
                  offsets are computed from these numbers).
    """

    q_positions: Any
    kv_positions: Any
    q_segments: Any = None
    kv_segments: Any = None
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    max_segments: int | None = flax.struct.field(pytree_node=False, default=None)
    in_order: bool = flax.struct.field(pytree_node=False, default=False)

    def dense(self) -> jax.Array:
        """Return it as bool [B, T, S]: whether a query sees a key."""
        return dense_mask(self)


def dense_mask(mask: AttentionMask) -> jax.Array:
    """Expand a mask to a dense array: bool [B, T, S]."""
    back = mask.q_positions[:, :, None] - mask.kv_positions[:, None, :]
    seen = back >= 0
    if mask.window is not None:
        seen &= back < mask.window
    if mask.q_segments is not None and mask.kv_segments is not None:
        seen &= mask.q_segments[:, :, None] == mask.kv_segments[:, None, :]
    return jnp.asarray(seen)
