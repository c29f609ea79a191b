"""The committed measurements that `auto` uses for its choice: one JSON file per GPU in `measured/`.

A file records its conditions ("gpu", "jax", "cudnn", "commit", "command" and others) and "rows":
one per direction, backend, shape and block sizes.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jaxpar.kernels.attention.dispatch.capability import (
    CAPABILITIES,
    AttentionRequest,
    is_last_resort,
)
from jaxpar.kernels.attention.hopper.blocks import BackwardBlocks, ForwardBlocks
from jaxpar.kernels.attention.triton.blocks import TritonBackward, TritonForward

type Blocks = ForwardBlocks | BackwardBlocks | TritonForward | TritonBackward

#: Backends with tunable block sizes, and the class of those of each direction.
TUNED: dict[str, dict[str, type]] = {
    "pallas_hopper": {"forward": ForwardBlocks, "backward": BackwardBlocks},
    "triton": {"forward": TritonForward, "backward": TritonBackward},
}

_CONDITIONS = {"gpu": str, "jax": str, "cudnn": int, "commit": str, "command": str, "rows": list}
_CHOICES = {
    "direction": ("forward", "backward"),
    "backend": tuple(CAPABILITIES),
    "kind": ("causal", "window", "packed", "general"),
    "dtype": ("bfloat16", "float16", "float32"),
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement. Choices compare `ms`; `tflops` is informative.

    deterministic       Whether a backward is reproducible bit for bit.
    window, documents   Details of the mask, for information only.
    """

    direction: str
    backend: str
    kind: str
    B: int
    T: int
    S: int
    H: int
    G: int
    D: int
    dtype: str
    blocks: Blocks | None
    ms: float
    tflops: float
    deterministic: bool = False
    window: int | None = None
    documents: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes that comparable measurements share, in addition to direction, kind and D."""
        return self.B, self.T, self.S, self.H, self.G


@functools.cache
def measurements(gpu: str) -> tuple[Measurement, ...]:
    """Return the rows for a GPU, given its name in JAX. Empty if there are no measurements.

    Raises:   ValueError for a malformed file.
    """
    folder = resources.files("jaxpar.kernels.attention.dispatch") / "measured"
    file = folder / file_name(gpu)
    return parse(file.read_text("utf-8"), file.name, gpu) if file.is_file() else ()


def file_name(gpu: str) -> str:
    """Return the file name for a GPU: "NVIDIA H200" -> "nvidia_h200.json"."""
    return gpu.lower().replace(" ", "_") + ".json"


def parse(text: str, name: str, gpu: str) -> tuple[Measurement, ...]:
    """Parse the rows of a file's text.

    Args:     name: the file's name, for errors. gpu: the required value of "gpu".
    Raises:   ValueError naming the file, row, field, value and valid values.
    """
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: is not valid JSON: {error}") from error
    _require(isinstance(table, dict), name, "file", table, "an object")
    for key, kind in _CONDITIONS.items():
        found = table.get(key)
        _require(isinstance(found, kind), name, key, found, f"given, as {kind.__name__}")
    _require(table["gpu"] == gpu, name, "gpu", table["gpu"], repr(gpu))
    return tuple(_row(values, f"{name}: rows[{i}]") for i, values in enumerate(table["rows"]))


def _require(ok: bool, where: str, field: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{where}: {field} = {value!r} must be {allowed}")


def _row(values: Any, where: str) -> Measurement:
    _require(isinstance(values, dict), where, "row", values, "an object")
    fields = {field.name: field for field in dataclasses.fields(Measurement)}
    for name in values:
        _require(name in fields, where, name, values[name], f"omitted; known: {', '.join(fields)}")
    for name, field in fields.items():
        given = name in values or field.default is not dataclasses.MISSING
        _require(given, where, name, None, "given")
    for name, allowed in _CHOICES.items():
        _require(values[name] in allowed, where, name, values[name], f"one of {', '.join(allowed)}")
    for name in ("B", "T", "S", "H", "G", "D"):
        _require(_is_count(values[name]), where, name, values[name], "a whole number above 0")
    for name in ("ms", "tflops"):
        _require(_is_positive(values[name]), where, name, values[name], "a number above 0")
    for name in ("window", "documents"):
        value = values.get(name)
        ok = value is None or _is_count(value)
        _require(ok, where, name, value, "a whole number above 0, or null")
    same = values.get("deterministic", False)
    _require(isinstance(same, bool), where, "deterministic", same, "true or false")
    return Measurement(**values | {"blocks": _blocks(values, where)})


def _blocks(values: dict[str, Any], where: str) -> Blocks | None:
    sizes, backend = values["blocks"], values["backend"]
    if backend not in TUNED:
        _require(sizes is None, where, "blocks", sizes, f"null for {backend}")
        return None
    cls = TUNED[backend][values["direction"]]
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    ok = isinstance(sizes, dict) and sorted(sizes) == sorted(fields)
    ok = ok and all(_is_size(name, kind, sizes[name]) for name, kind in fields.items())
    flags = [f"{name} is a bool" for name, kind in fields.items() if kind is bool]
    rule = f"{', '.join(fields)}, whole numbers above 0; {', '.join(['heads may be 0', *flags])}"
    _require(ok, where, "blocks", sizes, rule)
    return cls(**sizes)


def _is_size(name: str, kind: Any, value: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    return _is_count(value) or (name.endswith("heads") and value == 0 and isinstance(value, int))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


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
