"""The choice of kernels for a call, by measurements if there are any.

Forward and backward are chosen separately. All backends return the same log-sum-exp, float32 in
natural logarithm, so the forward of one works with the backward of another. The committed
measurements are one JSON file per GPU in `measured/`: its conditions ("gpu", "jax", "cudnn",
"commit", "command" and others) and "rows", one per direction, backend, shape and block sizes.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from jaxpar.kernels.attention.capability import (
    CAPABILITIES,
    AttentionRequest,
    is_last_resort,
    make_request,
    refusal,
)
from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.kernels.platform import Platform

if TYPE_CHECKING:
    from jaxpar.kernels.attention.hopper.blocks import BackwardBlocks, ForwardBlocks
    from jaxpar.kernels.attention.triton.blocks import TritonBackward, TritonForward

type Blocks = ForwardBlocks | BackwardBlocks | TritonForward | TritonBackward

#: Backends with tunable block sizes.
TUNED = ("pallas_hopper", "triton")

type _Count = Annotated[int, Meta(ge=1)]
type _Positive = Annotated[float, Meta(gt=0)]


class Measurement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement. Choices compare `ms`; `tflops` is informative.

    deterministic       Whether a backward is reproducible bit for bit.
    window, documents   Details of the mask, for information only.
    """

    direction: Literal["forward", "backward"]
    backend: Literal["cudnn", "pallas_hopper", "triton", "reference"]
    kind: Literal["causal", "window", "packed", "general"]
    B: _Count
    T: _Count
    S: _Count
    H: _Count
    G: _Count
    D: _Count
    dtype: Literal["bfloat16", "float16", "float32"]
    blocks: Any
    """`Blocks` of a tuned backend, else None."""
    ms: _Positive
    tflops: _Positive
    deterministic: bool = False
    window: _Count | None = None
    documents: _Count | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes that comparable measurements share, in addition to direction, kind and D."""
        return self.B, self.T, self.S, self.H, self.G


class _Table(Struct, frozen=True, kw_only=True):
    """A file: its conditions, and its rows."""

    gpu: str
    jax: str
    cudnn: int
    commit: str
    command: str
    rows: list[Measurement]


@functools.cache
def measurements(gpu: str) -> tuple[Measurement, ...]:
    """Return the rows for a GPU, given its name in JAX. Empty if there are no measurements.

    Raises:   ValueError for a malformed file.
    """
    folder = resources.files("jaxpar.kernels.attention") / "measured"
    file = folder / file_name(gpu)
    return parse(file.read_text("utf-8"), file.name, gpu) if file.is_file() else ()


def file_name(gpu: str) -> str:
    """Return the file name for a GPU: "NVIDIA H200" -> "nvidia_h200.json"."""
    return gpu.lower().replace(" ", "_") + ".json"


def parse(text: str, name: str, gpu: str) -> tuple[Measurement, ...]:
    """Parse the rows of a file's text.

    Args:     name: the file's name, for errors. gpu: the required value of "gpu".
    Raises:   ValueError naming the file, row, field and rule.
    """
    try:
        table = msgspec.json.decode(text, type=_Table)
        if table.gpu != gpu:
            raise ValueError(f"gpu = {table.gpu!r} must be {gpu!r}")
        return tuple(structs.replace(row, blocks=_blocks(row)) for row in table.rows)
    except ValueError as error:  # msgspec's are such
        raise ValueError(f"{name}: {error}") from error


def _blocks(row: Measurement) -> Blocks | None:
    """Return the block sizes of a row. Raises:   ValueError for others than its backend has."""
    if row.backend not in TUNED:
        if row.blocks is not None:
            raise ValueError(f"blocks = {row.blocks} must be null for {row.backend}")
        return None
    kind = _block_classes()[row.backend, row.direction]
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(row.blocks, dict) or sorted(row.blocks) != sorted(names):
        raise ValueError(f"blocks = {row.blocks} must be {', '.join(names)}")
    blocks = msgspec.convert(row.blocks, kind)
    sizes = {name: size for name, size in row.blocks.items() if not isinstance(size, bool)}
    if any(size < (0 if name.endswith("heads") else 1) for name, size in sizes.items()):
        raise ValueError(f"blocks = {row.blocks} must be whole numbers above 0; heads may be 0")
    return blocks


@functools.cache
def _block_classes() -> dict[tuple[str, str], Any]:
    from jaxpar.kernels.attention.hopper.blocks import BackwardBlocks, ForwardBlocks
    from jaxpar.kernels.attention.triton.blocks import TritonBackward, TritonForward

    return {
        ("pallas_hopper", "forward"): ForwardBlocks,
        ("pallas_hopper", "backward"): BackwardBlocks,
        ("triton", "forward"): TritonForward,
        ("triton", "backward"): TritonBackward,
    }


def fastest(
    rows: Sequence[Measurement], request: AttentionRequest, able: Sequence[str]
) -> Measurement | None:
    """Return the fastest of the able backends at the measured shape that is nearest to a request.

    A shape counts if every able backend except the last resorts was measured at it, with the
    request's direction, kind of mask and head dim, so a backend never wins because another was not
    measured. At such a shape, a last resort wins if it was measured and faster; not reference.
    A deterministic backward is also considered if it was not requested, because it is faster on
    short documents. The nearest shape has the smallest distance, in powers of two, of T x S; among
    equals, of the query heads per KV head; then of batch x query heads. There is no limit on the
    distance. Dtypes are not compared, because both measured ones have 16 bits.

    Returns:  a row, or None if no shape counts.
    """
    rivals = set(able) - {"reference"}
    needed = {name for name in rivals if not is_last_resort(name, request)} or rivals
    wanted = _comparable(request)
    by_shape: dict[tuple[int, ...], list[Measurement]] = {}
    for row in rows:
        serves = row.deterministic or not request.deterministic or row.direction == "forward"
        if _comparable(row) == wanted and row.backend in rivals and serves:
            by_shape.setdefault(row.shape, []).append(row)
    counted = [rows for rows in by_shape.values() if needed <= {row.backend for row in rows}]
    if not counted:
        return None
    nearest = min(counted, key=lambda rows: _distance(rows[0], request))
    return min(nearest, key=lambda row: row.ms)


def _comparable(of: Measurement | AttentionRequest) -> tuple:
    """Return the values in which a measurement must agree with a request."""
    return of.direction, of.kind, of.D


def _distance(row: Measurement, request: AttentionRequest) -> tuple[float, float, float]:
    def apart(a: float, b: float) -> float:
        return abs(math.log2(a / b))

    return (
        apart(row.T * row.S, request.T * request.S),
        apart(row.H / row.G, request.H / request.G),
        apart(row.B * row.H, request.B * request.H),
    )


# --------------------------------------------------------------------------------------- choice


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
    measured shape (`fastest`). Without a suitable measurement, it takes the first of
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
        from jaxpar.kernels.attention.hopper import blocks as hopper

        return (hopper.default_forward if forward else hopper.default_backward)(K)
    if backend == "triton":
        from jaxpar.kernels.attention.triton import blocks as triton

        which = triton.default_forward if forward else triton.default_backward
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
