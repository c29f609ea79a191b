"""The choice of kernels for a call, by measurements if there are any.

Forward and backward are chosen separately. All backends return the same log-sum-exp, float32 in
natural logarithm, so the forward of one works with the backward of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.kernels.attention.dispatch.capability import (
    CAPABILITIES,
    AttentionRequest,
    is_last_resort,
    make_request,
    refusal,
)
from jaxpar.kernels.attention.dispatch.measurements import (
    TUNED,
    Blocks,
    Measurement,
    fastest,
    measurements,
)
from jaxpar.kernels.attention.hopper import blocks as hopper_blocks
from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.kernels.attention.triton import blocks as triton_blocks
from jaxpar.kernels.platform import Platform


@dataclass(frozen=True)
class Choice:
    """The kernels of a call. Hashable, so it can be a static argument.

    forward, backward    Names of backends.
    *_blocks             Block sizes of a backend that is tunable, or None.
    deterministic        The backward is reproducible bit for bit.
    softcap              Cap of the scores, or None.
    reason               Reasons for the choice, for the log.
    """

    forward: str
    backward: str
    forward_blocks: Blocks | None = None
    backward_blocks: Blocks | None = None
    deterministic: bool = False
    softcap: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        """Describe the choice in one line, for the log."""
        both = f"forward {self.forward}, backward {self.backward}"
        names = self.forward if self.forward == self.backward else both
        return f"{names} ({self.reason})" if self.reason else names


@dataclass(frozen=True)
class _Pick:
    """The chosen kernel of one direction."""

    backend: str
    blocks: Blocks | None
    deterministic: bool  # even if not requested
    why: str


def choose(
    backend: str,
    q,
    k,
    mask: AttentionMask,
    *,
    platform: Platform | None = None,
    deterministic: bool = False,
    need_lse_gradient: bool = False,
    softcap: float | None = None,
) -> Choice:
    """Choose the kernels for a call: those of the named backend, or with "auto" the fastest.

    Of the backends that support a direction, "auto" takes the one that was fastest at the nearest
    measured shape (`measurements.fastest`). Without a suitable measurement, it takes the first of
    cudnn, pallas_hopper, triton and reference that supports the call, with the default block sizes
    of its `blocks.py`. reference stores all scores, so it is chosen only if no other backend
    supports the call.

    Args:     backend: "auto" or a name. q: [B, T, H, K], k: [B, S, G, K], local arrays or their
              shapes. platform: defaults to that of the first device. deterministic: require a
              backward that is reproducible bit for bit. need_lse_gradient: require a backward that
              accepts a cotangent of `lse`. softcap: cap of the scores.
    Raises:   ValueError for an unknown backend, or for a named one that does not support the call,
              naming those that do.
    """
    if backend != "auto" and backend not in CAPABILITIES:
        allowed = ", ".join(["auto", *CAPABILITIES])
        raise ValueError(f"attention backend {backend!r}: must be one of {allowed}")
    platform = platform or Platform.here()
    ask: dict[str, Any] = {
        "deterministic": deterministic,
        "lse_gradient": need_lse_gradient,
        "softcap": softcap,
    }
    forward, backward = (
        _pick(backend, make_request(direction, q, k, mask, platform, **ask))
        for direction in ("forward", "backward")
    )
    blocks = forward.blocks, backward.blocks
    why = forward.why
    if backward.why != why:
        why = f"forward: {forward.why}; backward: {backward.why}"
    same = deterministic or backward.deterministic
    return Choice(forward.backend, backward.backend, *blocks, same, softcap, why)


def explain(backend: str, q, k, mask: AttentionMask, **options) -> str:
    """Describe the choice of `choose` and its reasons in one line, for the log."""
    return str(choose(backend, q, k, mask, **options))


def _pick(backend: str, request: AttentionRequest) -> _Pick:
    refused = {name: refusal(name, request) for name in CAPABILITIES}
    able = [name for name, why in refused.items() if why is None]
    if backend != "auto" and backend not in able:
        can = ", ".join(able) or "none"
        raise ValueError(
            f"attention backend {backend!r}: {refused[backend]}. Backends that can: {can}."
        )
    named = [backend] if backend != "auto" else able
    row = fastest(_rows(request.platform), request, named)
    preferred = [name for name in named if not is_last_resort(name, request)] or named
    chosen = preferred[0] if row is None else row.backend
    blocks = _default_blocks(chosen, request) if row is None else row.blocks
    if backend == "auto" and request.platform.name != "gpu":
        why = [f"the others need an NVIDIA GPU, and the platform is {request.platform.name}"]
    elif backend == "auto":
        why = [f"not {name}: {no}" for name, no in refused.items() if no is not None]
    else:
        why = ["as configured"]
    same = row is not None and row.deterministic
    return _Pick(chosen, blocks, same, "; ".join([*why, *_evidence(chosen, row, named, request)]))


def _rows(platform: Platform) -> Sequence[Measurement]:
    return measurements(platform.kind) if platform.name == "gpu" else ()


def _default_blocks(backend: str, request: AttentionRequest) -> Blocks | None:
    forward, K = request.direction == "forward", request.D
    if backend == "pallas_hopper":
        return (hopper_blocks.default_forward if forward else hopper_blocks.default_backward)(K)
    if backend == "triton":
        which = triton_blocks.default_forward if forward else triton_blocks.default_backward
        return which(K, request.platform.compute_capability)
    return None


def _evidence(
    chosen: str, row: Measurement | None, rivals: list[str], request: AttentionRequest
) -> list[str]:
    """Return the evidence for a choice, if there was one between backends or block sizes."""
    if row is not None:
        shape = ", ".join(f"{name} {getattr(row, name)}" for name in ("B", "T", "S", "H", "G"))
        return [f"measured on {request.platform.kind} at {shape}"]
    if chosen == "reference" or (chosen not in TUNED and rivals == [chosen]):
        return []
    where = f"{request.kind} masks of head dim {request.D}"
    return [f"no measurement on {request.platform.kind} for {where}"]
