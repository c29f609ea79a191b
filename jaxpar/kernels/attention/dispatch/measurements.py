"""The committed measurements that `auto` chooses by: one JSON file per kind of GPU in `measured/`.

A file says what it was measured with ("gpu", "jax", "cudnn", "commit", "command", and any other
conditions) and holds "rows": one per direction, backend, shape and block sizes.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jaxpar.kernels.attention.dispatch.capability import CAPABILITIES, Request
from jaxpar.kernels.attention.hopper.blocks import BackwardBlocks, ForwardBlocks

#: The class of block sizes of each direction.
BLOCKS: dict[str, type] = {"forward": ForwardBlocks, "backward": BackwardBlocks}

#: Backends with block sizes to choose.
TUNED = ("pallas_hopper",)

_CONDITIONS = {"gpu": str, "jax": str, "cudnn": int, "commit": str, "command": str, "rows": list}
_CHOICES = {
    "direction": tuple(BLOCKS),
    "backend": tuple(CAPABILITIES),
    "kind": ("causal", "window", "packed", "general"),
    "dtype": ("bfloat16", "float16", "float32"),
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement. `ms` decides; `tflops` is for the reader.

    deterministic       of a backward: the same bits each time.
    window, documents   what the mask was, where it had one; told, not compared.
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
    blocks: ForwardBlocks | BackwardBlocks | None
    ms: float
    tflops: float
    deterministic: bool = False
    window: int | None = None
    documents: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """What makes two measurements comparable, besides direction, kind and D."""
        return self.B, self.T, self.S, self.H, self.G


@functools.cache
def measurements(gpu: str) -> tuple[Measurement, ...]:
    """The rows for a kind of GPU, by the name JAX gives it; none if nobody measured it.

    Raises:   ValueError for a file that is not as this module says.
    """
    folder = resources.files("jaxpar.kernels.attention.dispatch") / "measured"
    file = folder / file_name(gpu)
    return parse(file.read_text("utf-8"), file.name, gpu) if file.is_file() else ()


def file_name(gpu: str) -> str:
    """ "NVIDIA H200" -> "nvidia_h200.json"."""
    return gpu.lower().replace(" ", "_") + ".json"


def parse(text: str, name: str, gpu: str) -> tuple[Measurement, ...]:
    """The rows of a file's text.

    Args:     name: of the file, for errors. gpu: what its "gpu" must be.
    Raises:   ValueError naming file, row, field, value and what is allowed.
    """
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: is no JSON: {error}") from error
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
        _require(name in fields, where, name, values[name], f"left out: know {', '.join(fields)}")
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


def _blocks(values: dict[str, Any], where: str) -> ForwardBlocks | BackwardBlocks | None:
    sizes, cls = values["blocks"], BLOCKS[values["direction"]]
    if values["backend"] not in TUNED:
        _require(sizes is None, where, "blocks", sizes, f"null for {values['backend']}")
        return None
    names = [field.name for field in dataclasses.fields(cls)]
    ok = isinstance(sizes, dict) and sorted(sizes) == sorted(names)
    ok = ok and all(_is_count(item[1]) or item == ("heads", 0) for item in sizes.items())
    rule = f"{', '.join(names)}, whole numbers above 0, or heads 0 for all"
    _require(ok, where, "blocks", sizes, rule)
    return cls(**sizes)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def fastest(
    rows: Sequence[Measurement], request: Request, able: Sequence[str]
) -> Measurement | None:
    """The fastest of the able backends at the measured shape that is nearest to a request.

    A shape counts if every able backend but reference was measured at it, in the request's
    direction, kind of mask and head dim: so a backend never wins because its rival is missing. A
    deterministic backward also serves who does not ask for one: on short documents it is faster.
    The nearest has the least distance, in powers of two, of T x S; among equals, of the query
    heads per KV head; then of batch x query heads. There is no limit to the distance. The dtype
    is not compared: both that are measured have 16 bits.

    Returns:  a row, or None when no shape counts.
    """
    rivals = set(able) - {"reference"}
    wanted = _comparable(request)
    by_shape: dict[tuple[int, ...], list[Measurement]] = {}
    for row in rows:
        serves = row.deterministic or not request.deterministic or row.direction == "forward"
        if _comparable(row) == wanted and row.backend in rivals and serves:
            by_shape.setdefault(row.shape, []).append(row)
    counted = [rows for rows in by_shape.values() if {row.backend for row in rows} == rivals]
    if not counted:
        return None
    nearest = min(counted, key=lambda rows: _distance(rows[0], request))
    return min(nearest, key=lambda row: row.ms)


def _comparable(of: Measurement | Request) -> tuple:
    """What must be equal for a measurement to speak for a request."""
    return of.direction, of.kind, of.D


def _distance(row: Measurement, request: Request) -> tuple[float, float, float]:
    def apart(a: float, b: float) -> float:
        return abs(math.log2(a / b))

    return (
        apart(row.T * row.S, request.T * request.S),
        apart(row.H / row.G, request.H / request.G),
        apart(row.B * row.H, request.B * request.H),
    )
