"""The capabilities of each attention backend, and the reasons for which it refuses a request.

A backend serves a request only if every field of its row in `CAPABILITIES` allows it. Start a new
backend by declaring its capabilities here.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.kernels.platform import Platform, triton_missing

type Direction = Literal["forward", "backward"]
type Kind = Literal["causal", "window", "packed", "general"]

#: XLA flags that make cuDNN's attention backward deterministic.
DETERMINISM_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


@dataclass(frozen=True)
class Capability:
    """The requests that a backend supports. None means no limit.

    compute_capability   The only NVIDIA compute capability that it supports.
    since                The first NVIDIA compute capability that it supports.
    needs_gpu            It runs only on NVIDIA GPUs.
    dtypes               Dtypes of q, k and v.
    head_dims            A range of multiples, or a tuple of sizes.
    before_hopper        Largest head dim below compute capability 9.0, where packed documents are
                         not supported either.
    needs_order          Only tokens in text order (`AttentionMask.in_order`).
    needs_max_segments   Packed documents need `AttentionMask.max_segments`.
    lse_gradient         The backward accepts a cotangent of the log-sum-exp.
    softcap              It can cap the scores.
    narrow_values_since  The first compute capability for which the head dim of v may be smaller
                         than that of q and k; 0: any platform. Elsewhere v is padded (`widen`).
    narrow_packed        This also holds for packed documents. JAX gives cuDNN one list of offsets
                         for both q and the output, counted in elements of q.
    last_resort          "auto" takes it only if no other kernel serves the request, or if it was
                         measured to be the fastest.
    triton               It is compiled by Triton, a package.
    deterministic        When the backward is reproducible bit for bit: always, on request, or only
                         with one of DETERMINISM_FLAGS.
    """

    needs_gpu: bool
    compute_capability: str | None
    since: float | None
    dtypes: tuple[str, ...]
    head_dims: Sequence[int] | None
    before_hopper: int | None
    needs_order: bool
    needs_max_segments: bool
    lse_gradient: bool
    softcap: bool
    narrow_values_since: float | None
    narrow_packed: bool
    last_resort: bool
    triton: bool
    deterministic: Literal["always", "on request", "by XLA flag"]


#: The backends, in order of preference for shapes without measurements (`choice.py`).
CAPABILITIES: dict[str, Capability] = {
    "cudnn": Capability(
        needs_gpu=True,
        compute_capability=None,
        since=None,
        dtypes=("bfloat16", "float16"),
        head_dims=range(8, 257, 8),
        before_hopper=128,  # the limit in JAX's own function for these kernels
        needs_order=True,
        needs_max_segments=True,
        lse_gradient=False,
        softcap=False,
        narrow_values_since=9.0,
        narrow_packed=False,
        last_resort=False,
        triton=False,
        deterministic="by XLA flag",
    ),
    "pallas_hopper": Capability(
        needs_gpu=True,
        compute_capability="9.0",
        since=None,
        dtypes=("bfloat16", "float16"),
        head_dims=(64, 128, 256),
        before_hopper=None,
        needs_order=False,
        needs_max_segments=False,
        lse_gradient=True,
        softcap=False,
        narrow_values_since=None,
        narrow_packed=False,
        last_resort=False,
        triton=False,
        deterministic="on request",
    ),
    "triton": Capability(
        needs_gpu=True,
        compute_capability=None,
        since=8.0,
        dtypes=("bfloat16", "float16"),
        head_dims=range(16, 257, 16),
        before_hopper=None,
        needs_order=False,
        needs_max_segments=False,
        lse_gradient=True,
        softcap=True,
        narrow_values_since=None,
        narrow_packed=False,
        last_resort=True,
        triton=True,
        deterministic="always",
    ),
    "reference": Capability(
        needs_gpu=False,
        compute_capability=None,
        since=None,
        dtypes=("bfloat16", "float16", "float32"),
        head_dims=None,
        before_hopper=None,
        needs_order=False,
        needs_max_segments=False,
        lse_gradient=True,
        softcap=True,
        narrow_values_since=0,
        narrow_packed=True,
        last_resort=True,
        triton=False,
        deterministic="always",
    ),
}


@dataclass(frozen=True)
class AttentionRequest:
    """One direction of one call: its shapes, its mask, and its requirements.

    kind            Kind of mask: general (any positions), packed (documents in text order), window
                    (one document, sliding window) or causal.
    deterministic   The backward must be reproducible bit for bit.
    lse_gradient    The backward must accept a cotangent of the log-sum-exp.
    softcap         Cap of the scores, or None.
    """

    direction: Direction
    platform: Platform
    B: int
    T: int
    S: int
    H: int
    G: int
    D: int
    dtype: str
    kind: Kind
    in_order: bool
    packed: bool
    max_segments: int | None
    deterministic: bool = False
    lse_gradient: bool = False
    softcap: float | None = None


def make_request(
    direction: Direction,
    q,
    k,
    mask: AttentionMask,
    platform: Platform,
    *,
    deterministic: bool = False,
    lse_gradient: bool = False,
    softcap: float | None = None,
) -> AttentionRequest:
    """Return the request for one direction of a call. q and k are arrays or their shapes."""
    B, T, H, D = q.shape
    return AttentionRequest(
        direction=direction,
        platform=platform,
        B=B,
        T=T,
        S=k.shape[1],
        H=H,
        G=k.shape[2],
        D=D,
        dtype=jnp.dtype(q.dtype).name,
        kind=kind_of(mask),
        in_order=mask.in_order,
        packed=mask.q_segments is not None,
        max_segments=mask.max_segments,
        deterministic=deterministic,
        lse_gradient=lse_gradient,
        softcap=softcap,
    )


def kind_of(mask: AttentionMask) -> Kind:
    """Return the kind of a mask, by which measurements are classified."""
    if not mask.in_order:
        return "general"
    if mask.q_segments is not None:
        return "packed"
    return "causal" if mask.window is None else "window"


def refusal(backend: str, request: AttentionRequest) -> str | None:
    """Return all reasons why a backend cannot serve a request, or None if it can."""
    able = CAPABILITIES[backend]
    reasons = [_wrong_device(able, request.platform), _wrong_arrays(able, request)]
    if request.direction == "backward":
        reasons.append(_wrong_backward(able, request))
    return "; ".join(reason for reason in reasons if reason) or None


def takes_narrow_values(backend: str, platform: Platform, packed: bool) -> bool:
    """Return whether v's head dim may be smaller than that of q and k, without padding.

    Args:     packed: whether rows have several documents.
    """
    able = CAPABILITIES[backend]
    if able.narrow_values_since is None or (packed and not able.narrow_packed):
        return False
    return float(platform.compute_capability or 0) >= able.narrow_values_since


def is_last_resort(backend: str, request: AttentionRequest) -> bool:
    """Return whether "auto" takes a backend only if no other serves the request, or if measured.

    A deterministic backward is so where only an XLA flag makes it deterministic: XLA then picks a
    kernel that was not measured, whose workspace is unknown before the program runs.
    """
    able = CAPABILITIES[backend]
    by_flag = request.deterministic and able.deterministic == "by XLA flag"
    return able.last_resort or (request.direction == "backward" and by_flag)


def _wrong_device(able: Capability, platform: Platform) -> str | None:
    if able.needs_gpu and platform.name != "gpu":
        return f"it needs an NVIDIA GPU, and the platform is {platform.name}"
    needed, there = able.compute_capability, platform.compute_capability
    if needed is not None and there != needed:
        return (
            f"it needs an NVIDIA GPU of compute capability {needed} (Hopper), and {platform.kind} "
            f"has {there or 'none'}"
        )
    if able.since is not None and float(there or 0) < able.since:
        return (
            f"it needs an NVIDIA GPU of compute capability {able.since} or later, and "
            f"{platform.kind} has {there or 'none'}"
        )
    return triton_missing(platform) if able.triton else None


def _wrong_arrays(able: Capability, request: AttentionRequest) -> str | None:
    if request.dtype not in able.dtypes:
        return f"it supports {' or '.join(able.dtypes)}, and q is {request.dtype}"
    if able.head_dims is not None and request.D not in able.head_dims:
        return f"head dims must be {in_words(able.head_dims)}, and q has head dim {request.D}"
    if able.before_hopper is not None and _is_before_hopper(request.platform):
        there = f"and {request.platform.kind} has {request.platform.compute_capability}"
        if able.before_hopper < request.D:
            return f"head dims above {able.before_hopper} need compute capability 9.0, {there}"
        if request.packed:
            return f"packed documents need compute capability 9.0, {there}"
    if able.needs_order and not request.in_order:
        return "it supports only tokens in text order, and these are permuted or gathered"
    if able.needs_max_segments and request.packed and request.max_segments is None:
        return "packed documents need mask.max_segments, which is not set"
    if request.softcap is not None and not able.softcap:
        return "it cannot cap scores (softcap)"
    return None


def _is_before_hopper(platform: Platform) -> bool:
    there = platform.compute_capability
    return platform.name == "gpu" and bool(there) and float(there) < 9.0


def _wrong_backward(able: Capability, request: AttentionRequest) -> str | None:
    if request.lse_gradient and not able.lse_gradient:
        return "it has no gradient of the log-sum-exp"
    if not (request.deterministic and able.deterministic == "by XLA flag"):
        return None
    if not xla_is_deterministic():
        return f"its backward is deterministic only with {DETERMINISM_FLAGS[0]}=true in XLA_FLAGS"
    if request.packed:
        return "its deterministic backward of packed documents needs more memory than a GPU has"
    return None


def in_words(head_dims: Sequence[int]) -> str:
    """Format head dims as "multiples of 8 up to 256", or "64, 128 or 256"."""
    if isinstance(head_dims, range):
        return f"multiples of {head_dims.step} up to {head_dims[-1]}"
    *most, last = map(str, head_dims)
    return f"{', '.join(most)} or {last}" if most else last


def xla_is_deterministic() -> bool:
    """Return whether XLA_FLAGS requests deterministic kernels. The last of repeated flags wins."""
    given = {}
    for word in os.environ.get("XLA_FLAGS", "").split():
        name, equals, value = word.partition("=")
        given[name] = value.lower() in ("true", "1") if equals else True
    return any(given.get(name, False) for name in DETERMINISM_FLAGS)


# ----------- Values whose head dim is smaller than that of queries and keys, as in latent attention
#
# A kernel that has one head dim computes them exactly: v is padded with zeros, which add columns of
# zeros to the output, and these are cut off. DeepSeek's 192 and 128 then cost 6/5 of the products.


def widen(
    backend: str, mask: AttentionMask, q: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Pad the last dimension of arrays to q's head dim, if a backend needs it.

    Args:     arrays: v, and for a backward out and d_out: [..., I], I at most q's head dim.
    """
    if takes_narrow_values(backend, Platform.here(), packed=mask.q_segments is not None):
        return arrays
    more = [q.shape[-1] - a.shape[-1] for a in arrays]
    return tuple(_padded(a, by) if by else a for a, by in zip(arrays, more, strict=True))


def _padded(a: jax.Array, by: int) -> jax.Array:
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, by)])
