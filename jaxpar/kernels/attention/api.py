"""The one entry to attention, and the choice of a backend.

A backend is a module with `forward` and `backward`, in the convention of `reference.py`, and an
entry in `CAPABILITIES`. A request that the named backend cannot serve is an error that says which
one can; nothing falls back silently.
"""

import functools
from types import ModuleType
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.kernels.attention import cudnn, reference
from jaxpar.kernels.attention.mask import AttentionMask

type Backend = Literal["reference", "cudnn"]

#: Fastest first.
BACKENDS: dict[str, ModuleType] = {"cudnn": cudnn, "reference": reference}


def refusal(backend: str, q, k, mask: AttentionMask, platform: str) -> str | None:
    """Why a backend cannot serve a request; None when it can."""
    if backend == "reference":
        return None
    if platform != "gpu":
        return f"it needs an NVIDIA GPU, and the platform is {platform}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and q is {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"it takes head dims that are multiples of 8 up to 256, and this is {q.shape[-1]}"
    if not mask.in_order:
        return "it knows only the text's own order, and these positions are permuted or gathered"
    if mask.q_segments is not None and mask.max_segments is None:
        return "it takes documents by offset, and mask.max_segments is not given"
    return None


def backend_for(backend: str, q, k, mask: AttentionMask, platform: str | None = None) -> Backend:
    """The backend that will serve a request: the named one, or for "auto" the fastest that can.

    That is cudnn wherever it can: reference holds every score.

    Args:     backend: "auto" or a name. platform: "gpu" or "cpu"; None: that of the first device.
    Raises:   ValueError when the named backend cannot serve the request, naming one that can.
    """
    platform = platform or jax.devices()[0].platform
    if backend == "auto":
        able = [b for b in BACKENDS if refusal(b, q, k, mask, platform) is None]
        return able[0]  # type: ignore[return-value]
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is none of {', '.join(BACKENDS)}")
    why = refusal(backend, q, k, mask, platform)
    if why is not None:
        able = [b for b in BACKENDS if refusal(b, q, k, mask, platform) is None]
        raise ValueError(f"attention backend {backend!r}: {why}. Can serve it: {', '.join(able)}.")
    return backend  # type: ignore[return-value]


def explain(backend: str, q, k, mask: AttentionMask, platform: str | None = None) -> str:
    """What `backend_for` chooses, and why not the faster ones, for the log."""
    platform = platform or jax.devices()[0].platform
    chosen = backend_for(backend, q, k, mask, platform)
    faster = list(BACKENDS)[: list(BACKENDS).index(chosen)]
    why = [f"not {b}: {refusal(b, q, k, mask, platform) or 'as configured'}" for b in faster]
    return f"{chosen} ({'; '.join(why)})" if why else chosen


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, *, backend: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Masked softmax attention with grouped queries.

    Args:     q: [B, T, H, K]. k, v: [B, S, G, K], H a multiple of G. Local shards or whole.
              mask: who sees whom. backend: "auto", "reference" or "cudnn".
    Returns:  out [B, T, H, K] in q's dtype, and the natural log-sum-exp, float32 [B, H, T].
              `out` is saved under the remat name "attn_out" and `lse` under "attn_lse".
    Raises:   ValueError for shapes that do not fit, a backend that cannot serve them, or a
              gradient asked of cudnn's `lse`, which it cannot give.
    """
    _check(q, k, v, mask)
    chosen = backend_for(backend, q, k, mask)
    out, lse = _attention(q, k, v, mask, chosen)
    return out, (_refuse_gradient(lse) if chosen == "cudnn" else lse)


def forward(q, k, v, mask: AttentionMask, backend: Backend) -> tuple[jax.Array, jax.Array]:
    """`attention` without a derivative, for schedules that place the backward themselves."""
    return BACKENDS[backend].forward(q, k, v, mask)


def backward(q, k, v, mask: AttentionMask, out, lse, d_out, d_lse, backend: Backend):
    """dq, dk, dv of `forward`, given the output and log-sum-exp over all keys of each query."""
    return BACKENDS[backend].backward(q, k, v, mask, out, lse, d_out, d_lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, mask, backend):
    return forward(q, k, v, mask, backend)


def _attention_forward(q, k, v, mask, backend):
    out, lse = forward(q, k, v, mask, backend)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return (out, lse), (q, k, v, mask, out, lse)


def _attention_backward(backend, saved, cotangents):
    q, k, v, mask, out, lse = saved
    d_out, d_lse = cotangents
    dq, dk, dv = backward(q, k, v, mask, out, lse, d_out, d_lse, backend)
    return dq, dk, dv, None


_attention.defvjp(_attention_forward, _attention_backward)


@jax.custom_vjp
def _refuse_gradient(lse):
    return lse


def _raise_on_gradient(_, d_lse):
    raise ValueError(
        "attention backend 'cudnn' gives no gradient of the log-sum-exp: use backend 'reference', "
        "or jax.lax.stop_gradient on it"
    )


_refuse_gradient.defvjp(lambda lse: (lse, None), _raise_on_gradient)


def _check(q, k, v, mask: AttentionMask) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(f"want q [B,T,H,K], k and v [B,S,G,K]; got {q.shape} {k.shape} {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or head dim")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not divisible by {k.shape[2]} KV heads")
    if mask.q_positions.shape != q.shape[:2] or mask.kv_positions.shape != k.shape[:2]:
        raise ValueError(
            f"mask positions {mask.q_positions.shape}, {mask.kv_positions.shape} do not fit "
            f"q {q.shape} and k {k.shape}"
        )
    if (mask.q_segments is None) != (mask.kv_segments is None):
        raise ValueError("mask has segments of the queries or of the keys alone: give both or none")
    for name, segments, places in (
        ("q_segments", mask.q_segments, mask.q_positions),
        ("kv_segments", mask.kv_segments, mask.kv_positions),
    ):
        if segments is not None and segments.shape != places.shape:
            raise ValueError(
                f"mask.{name} {segments.shape} must be {places.shape}, as its positions"
            )
    if mask.window is not None and mask.window < 1:
        raise ValueError(f"window = {mask.window} must be at least 1, or None")
