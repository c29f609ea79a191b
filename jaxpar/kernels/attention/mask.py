"""Which keys a query may see, said once for all backends."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class AttentionMask:
    """Causal attention inside documents, at any positions, optionally in a sliding window.

    A query sees a key when both are in the same segment, the key's position is not after the
    query's, and less than `window` before it. Positions may be in any order (zigzag), and query
    and key lengths may differ.

    q_positions   int32 [B, T].
    kv_positions  int32 [B, S].
    q_segments    int32 [B, T], or None: one segment.
    kv_segments   int32 [B, S], or None.
    window        static; None: no limit.
    max_segments  static; no row holds more segments. Needed by backends that take their offsets.
    in_order      static; True promises T = S and the text's own order: positions that count up
                  by one inside a segment, and segments whose tokens lie end to end, numbered
                  from 1 on in each row (cuDNN's offsets are found by number).
    """

    q_positions: Any
    kv_positions: Any
    q_segments: Any = None
    kv_segments: Any = None
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    max_segments: int | None = flax.struct.field(pytree_node=False, default=None)
    in_order: bool = flax.struct.field(pytree_node=False, default=False)


def dense_mask(mask: AttentionMask) -> jax.Array:
    """The mask spelt out: bool [B, T, S]."""
    back = mask.q_positions[:, :, None] - mask.kv_positions[:, None, :]
    seen = back >= 0
    if mask.window is not None:
        seen &= back < mask.window
    if mask.q_segments is not None and mask.kv_segments is not None:
        seen &= mask.q_segments[:, :, None] == mask.kv_segments[:, None, :]
    return jnp.asarray(seen)
