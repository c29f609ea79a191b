"""What each attention backend can do: one declared table, and the refusals that follow from it.

A backend serves a request only if every column of its row in `CAPABILITIES` allows it. The columns
are the truth about what a kernel computes exactly; a new backend starts by declaring them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.kernels.platform import Platform

type Direction = Literal["forward", "backward"]
type Kind = Literal["causal", "window", "packed", "general"]

#: XLA flags under which cuDNN's attention backward adds in one order.
DETERMINISM_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


@dataclass(frozen=True)
class Capability:
    """What a backend computes exactly; None stands for no limit.

    compute_capability   the one NVIDIA compute capability that it is written for.
    needs_gpu            it runs on NVIDIA GPUs only.
    dtypes               of q, k and v.
    head_dims            a range from the first of equal steps, or the sizes one by one.
    before_hopper        less than all that, below compute capability 9.0: the largest head dim, and
                         no packed documents.
    needs_order          only the text's own order (`AttentionMask.in_order`).
    needs_max_segments   packed documents need `AttentionMask.max_segments`.
    lse_gradient         the backward takes a cotangent of the log-sum-exp.
    deterministic        the backward gives the same bits each time: always, on request, or only
                         under one of DETERMINISM_FLAGS.
    """

    needs_gpu: bool
    compute_capability: str | None
    dtypes: tuple[str, ...]
    head_dims: Sequence[int] | None
    before_hopper: int | None
    needs_order: bool
    needs_max_segments: bool
    lse_gradient: bool
    deterministic: Literal["always", "on request", "by XLA flag"]


#: In the order of preference where nothing is measured (`choice.py`).
CAPABILITIES: dict[str, Capability] = {
    "cudnn": Capability(
        needs_gpu=True,
        compute_capability=None,
        dtypes=("bfloat16", "float16"),
        head_dims=range(8, 257, 8),
        before_hopper=128,  # as JAX's own entry to these kernels has it
        needs_order=True,
        needs_max_segments=True,
        lse_gradient=False,
        deterministic="by XLA flag",
    ),
    "pallas_hopper": Capability(
        needs_gpu=True,
        compute_capability="9.0",
        dtypes=("bfloat16", "float16"),
        head_dims=(64, 128, 256),
        before_hopper=None,
        needs_order=False,
        needs_max_segments=False,
        lse_gradient=True,
        deterministic="on request",
    ),
    "reference": Capability(
        needs_gpu=False,
        compute_capability=None,
        dtypes=("bfloat16", "float16", "float32"),
        head_dims=None,
        before_hopper=None,
        needs_order=False,
        needs_max_segments=False,
        lse_gradient=True,
        deterministic="always",
    ),
}


@dataclass(frozen=True)
class Request:
    """One direction of one call: its shape, what its mask knows, and what is asked of it.

    kind            of mask: general (any positions), packed (documents in order), window (one
                    document, sliding window), causal.
    deterministic   the backward must give the same bits each time.
    lse_gradient    the backward must take a cotangent of the log-sum-exp.
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


def make_request(
    direction: Direction,
    q,
    k,
    mask: AttentionMask,
    platform: Platform,
    *,
    deterministic: bool = False,
    lse_gradient: bool = False,
) -> Request:
    """The request that a call makes of a backend; arrays or their shapes will do."""
    B, T, H, D = q.shape
    return Request(
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
    )


def kind_of(mask: AttentionMask) -> Kind:
    """The kind of mask that measurements are kept by."""
    if not mask.in_order:
        return "general"
    if mask.q_segments is not None:
        return "packed"
    return "causal" if mask.window is None else "window"


def refusal(backend: str, request: Request) -> str | None:
    """Why a backend cannot serve a request, every reason; None when it can."""
    able = CAPABILITIES[backend]
    reasons = [_wrong_device(able, request.platform), _wrong_arrays(able, request)]
    if request.direction == "backward":
        reasons.append(_wrong_backward(able, request))
    return "; ".join(reason for reason in reasons if reason) or None


def _wrong_device(able: Capability, platform: Platform) -> str | None:
    if able.needs_gpu and platform.name != "gpu":
        return f"it needs an NVIDIA GPU, and the platform is {platform.name}"
    needed, there = able.compute_capability, platform.compute_capability
    if needed is not None and there != needed:
        return (
            f"it needs an NVIDIA GPU of compute capability {needed} (Hopper), and {platform.kind} "
            f"has {there or 'none'}"
        )
    return None


def _wrong_arrays(able: Capability, request: Request) -> str | None:
    if request.dtype not in able.dtypes:
        return f"it computes in {' or '.join(able.dtypes)}, and q is {request.dtype}"
    if able.head_dims is not None and request.D not in able.head_dims:
        return f"it takes head dims that are {in_words(able.head_dims)}, and this is {request.D}"
    if able.before_hopper is not None and _is_before_hopper(request.platform):
        there = f"and {request.platform.kind} has {request.platform.compute_capability}"
        if able.before_hopper < request.D:
            return f"head dims above {able.before_hopper} need compute capability 9.0, {there}"
        if request.packed:
            return f"it takes packed documents from compute capability 9.0 on, {there}"
    if able.needs_order and not request.in_order:
        return "it knows only the text's own order, and these positions are permuted or gathered"
    if able.needs_max_segments and request.packed and request.max_segments is None:
        return "it takes documents by offset, and mask.max_segments is not given"
    return None


def _is_before_hopper(platform: Platform) -> bool:
    there = platform.compute_capability
    return platform.name == "gpu" and bool(there) and float(there) < 9.0


def _wrong_backward(able: Capability, request: Request) -> str | None:
    if request.lse_gradient and not able.lse_gradient:
        return "it gives no gradient of the log-sum-exp"
    by_flag = able.deterministic == "by XLA flag"
    if request.deterministic and by_flag and not xla_is_deterministic():
        return f"its backward is deterministic only with {DETERMINISM_FLAGS[0]}=true in XLA_FLAGS"
    return None


def in_words(head_dims: Sequence[int]) -> str:
    """ "multiples of 8 up to 256", or "64, 128 or 256"."""
    if isinstance(head_dims, range):
        return f"multiples of {head_dims.step} up to {head_dims[-1]}"
    *most, last = map(str, head_dims)
    return f"{', '.join(most)} or {last}" if most else last


def xla_is_deterministic() -> bool:
    """Whether XLA_FLAGS asks for deterministic kernels; of a flag given twice, the last counts."""
    given = {}
    for word in os.environ.get("XLA_FLAGS", "").split():
        name, equals, value = word.partition("=")
        given[name] = value.lower() in ("true", "1") if equals else True
    return any(given.get(name, False) for name in DETERMINISM_FLAGS)
