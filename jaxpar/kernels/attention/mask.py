"""The attention mask: which keys a query attends to, in one form for all backends."""

from typing import Any, NoReturn

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


# ----- Checks of the arguments of `attention`. Errors name the argument, its value and valid values


DTYPES = ("bfloat16", "float16", "float32")


def check_arguments(q, k, v, mask: AttentionMask, sinks: Any = None) -> None:
    """Check the shapes and dtypes of attention's arguments.

    Raises:   ValueError for the first invalid argument.
    """
    _check_arrays(q, k, v)
    _check_heads(q, k)
    _check_mask(q, k, mask)
    if sinks is not None and sinks.shape != q.shape[2:3]:
        _refuse("sinks.shape", sinks.shape, f"{q.shape[2:3]}, one number for each head of q")


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise ValueError(f"attention: {name} = {value} must be {allowed}")


def _check_arrays(q, k, v) -> None:
    letters = {"q": "[B, T, H, K]", "k": "[B, S, G, K]", "v": "[B, S, G, K]"}
    for (name, shape), array in zip(letters.items(), (q, k, v), strict=True):
        if array.ndim != 4:
            _refuse(f"{name}.shape", array.shape, f"four-dimensional, {shape}")
        if 0 in array.shape:
            _refuse(f"{name}.shape", array.shape, f"{shape} without dimensions of size 0")
        dtype = jnp.dtype(array.dtype).name
        if dtype not in DTYPES:
            _refuse(f"{name}.dtype", dtype, f"one of {', '.join(DTYPES)}")
        if dtype != jnp.dtype(q.dtype).name:
            _refuse(f"{name}.dtype", dtype, f"the dtype of q, {jnp.dtype(q.dtype).name}")
    if k.shape[:3] != v.shape[:3] or v.shape[3] > k.shape[3]:
        _refuse("v.shape", v.shape, f"the shape of k, {k.shape}, or with a smaller head dim")


def _check_heads(q, k) -> None:
    if q.shape[0] != k.shape[0]:
        _refuse("k.shape", k.shape, f"a shape with q's batch size, {q.shape[0]}")
    if q.shape[3] != k.shape[3]:
        _refuse("k.shape", k.shape, f"a shape with q's head dim, {q.shape[3]}")
    if q.shape[2] % k.shape[2]:
        allowed = f"a shape with a number of heads divisible by the {k.shape[2]} KV heads"
        _refuse("q.shape", q.shape, f"{allowed}, not {q.shape[2]}")


def _check_mask(q, k, mask: AttentionMask) -> None:
    if (mask.q_segments is None) != (mask.kv_segments is None):
        given = "kv_segments" if mask.q_segments is None else "q_segments"
        _refuse("mask segments", f"only {given}", "both q_segments and kv_segments, or neither")
    wanted = {"q": q.shape[:2], "kv": k.shape[:2]}
    for side, shape in wanted.items():
        for what in ("positions", "segments"):
            name = f"{side}_{what}"
            array = getattr(mask, name)
            if array is None and what == "segments":
                continue
            if array.shape != shape:
                of = "q" if side == "q" else "k"
                _refuse(f"mask.{name}.shape", array.shape, f"{shape}, batch and length of {of}")
            if jnp.dtype(array.dtype).name != "int32":
                _refuse(f"mask.{name}.dtype", array.dtype, "int32")
    for name in ("window", "max_segments"):
        value = getattr(mask, name)
        if value is not None and not (type(value) is int and value >= 1):
            _refuse(f"mask.{name}", value, "a whole number of at least 1, or None")
    if mask.in_order and q.shape[1] != k.shape[1]:
        lengths = f"True for {q.shape[1]} queries and {k.shape[1]} keys"
        _refuse("mask.in_order", lengths, "False, because the lengths differ")
