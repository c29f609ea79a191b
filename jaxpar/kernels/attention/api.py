"""The attention API: a differentiable function that runs the chosen kernels.

A backend is a module with the functions `forward` and `backward`, with the signatures of those in
`reference.py`, and a row in `CAPABILITIES`. `kernels/attention/choice.py` chooses the
backend. If a named backend does not support a request, the call raises an error that lists those
that do. There is no silent fallback.
"""

import functools
from types import ModuleType
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.kernels.attention import reference
from jaxpar.kernels.attention.capability import CAPABILITIES, widen
from jaxpar.kernels.attention.choice import Choice, choose
from jaxpar.kernels.attention.mask import AttentionMask, check_arguments
from jaxpar.kernels.attention.sinks import add_sinks, sinks_gradient
from jaxpar.kernels.platform import imported_when_used

BACKENDS: dict[str, ModuleType] = {
    # Mosaic's compiler takes a sixth of a program's import time, and only GPUs need it.
    "cudnn": imported_when_used("jaxpar.kernels.attention.cudnn"),
    "pallas_hopper": imported_when_used("jaxpar.kernels.attention.hopper.api"),
    "triton": imported_when_used("jaxpar.kernels.attention.triton.api"),
    "reference": reference,
}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: AttentionMask,
    *,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute masked softmax attention with grouped queries.

    Args:     q: [B, T, H, K]. k: [B, S, G, K], v: [B, S, G, I], H a multiple of G, I at most K,
              all of one dtype. Local shards or global arrays. mask: the keys that each query
              attends to. sinks: [H], scores without keys, which join the softmax (`sinks.py`).
              softcap: c, to replace scores s by c * tanh(s / c); not those of sinks. backend:
              "auto", or a name in BACKENDS. deterministic: make the backward reproducible bit for
              bit.
    Returns:  out [B, T, H, I] in q's dtype, and the natural log-sum-exp, float32 [B, H, T], which
              includes the sinks.
              `out` is saved under the remat name "attn_out" and `lse` under "attn_lse".
    Raises:   ValueError for invalid arguments, a backend that does not support them, or a gradient
              of `lse` if the chosen backward does not compute it.
    """
    check_arguments(q, k, v, mask, sinks)
    choice = choose(backend, q, k, mask, deterministic=deterministic, softcap=softcap)
    out, lse = _attention(q, k, v, sinks, mask, choice)
    if not CAPABILITIES[choice.backward].lse_gradient:
        lse = _refuse_gradient(lse, choice.backward)
    return out, lse


def forward(q, k, v, mask: AttentionMask, choice: Choice) -> tuple[jax.Array, jax.Array]:
    """`attention` without a derivative, for callers that call `backward` themselves."""
    options = _options(choice, choice.forward_blocks)
    (wide,) = widen(choice.forward, mask, q, v)
    out, lse = BACKENDS[choice.forward].forward(q, k, wide, mask, **options)
    return out[..., : v.shape[-1]], lse


def backward(q, k, v, mask: AttentionMask, out, lse, d_out, d_lse, choice: Choice):
    """Compute dq, dk and dv of `forward`, given the output and log-sum-exp over all keys."""
    options = _options(choice, choice.backward_blocks)
    if CAPABILITIES[choice.backward].deterministic == "on request":
        options["deterministic"] = choice.deterministic
    module = BACKENDS[choice.backward]
    wide, out, d_out = widen(choice.backward, mask, q, v, out, d_out)
    dq, dk, dv = module.backward(q, k, wide, mask, out, lse, d_out, d_lse, **options)
    return dq, dk, dv[..., : v.shape[-1]]


def _options(choice: Choice, blocks: Any) -> dict[str, Any]:
    given = {"blocks": blocks, "softcap": choice.softcap}
    return {name: value for name, value in given.items() if value is not None}


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q, k, v, sinks, mask, choice):
    return add_sinks(*forward(q, k, v, mask, choice), sinks)


def _attention_forward(q, k, v, sinks, mask, choice):
    out, lse = add_sinks(*forward(q, k, v, mask, choice), sinks)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return (out, lse), (q, k, v, sinks, mask, out, lse)


def _attention_backward(choice, saved, cotangents):
    q, k, v, sinks, mask, out, lse = saved
    d_out, d_lse = cotangents
    d_sinks = sinks_gradient(sinks, out, lse, d_out, d_lse)
    dq, dk, dv = backward(q, k, v, mask, out, lse, d_out, d_lse, choice)
    return dq, dk, dv, d_sinks, None


_attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _refuse_gradient(lse, backend):
    return lse


def _raise_on_gradient(backend, _, d_lse):
    able = [name for name, can in CAPABILITIES.items() if can.lse_gradient]
    named = " or ".join(f'backend="{name}"' for name in able)
    raise ValueError(
        f"attention backend {backend!r} does not compute the gradient of the log-sum-exp: pass "
        f"{named}, or apply jax.lax.stop_gradient to the log-sum-exp"
    )


_refuse_gradient.defvjp(lambda lse, backend: (lse, None), _raise_on_gradient)
