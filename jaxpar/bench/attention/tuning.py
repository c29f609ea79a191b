"""Writes the table of measurements from which backends and block sizes are chosen."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxpar.kernels.attention.dispatch
from jaxpar.bench.attention import exactness
from jaxpar.bench.attention.contest import (
    BackendPrograms,
    Row,
    Saved,
    conditions_of,
    figures,
    message,
    refusal,
)
from jaxpar.bench.attention.shapes import Arrays, AttentionShape, draw
from jaxpar.bench.matmuls.sustained import TIMED, WARM_UP
from jaxpar.bench.timing import Sustained, Timing, time_interleaved
from jaxpar.bench.training import conditions
from jaxpar.config import ConfigError
from jaxpar.config.json_reader import read_json
from jaxpar.kernels.attention.dispatch import capability, measurements
from jaxpar.kernels.attention.hopper import blocks as hopper
from jaxpar.kernels.attention.triton import blocks as triton
from jaxpar.kernels.platform import Platform
from jaxpar.runtime.files import json_output

#: The folder of the tables, one per kind of GPU.
TABLES = Path(jaxpar.kernels.attention.dispatch.__file__).parent / "measured"

#: Candidates are timed at the power limit, as in a step.
AT_THE_LIMIT = Sustained(settle=WARM_UP, timed=TIMED)

#: Batches per candidate, unless --repeats is given.
REPEATS = 3

#: Fields that identify a row of the table: a new measurement replaces the old one.
SHAPE = ("kind", *"BTSHGD", "dtype", "window", "documents")
KEY = ("direction", "deterministic", "backend", *SHAPE, "blocks")


def default_table() -> Path:
    """Return the table of this GPU.

    Raises:   ConfigError without a GPU.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        rule, fix = "is required without a GPU", "add --table runs/table.json"
        raise ConfigError("--table", None, rule, fix)
    return TABLES / measurements.file_name(device.device_kind)


@dataclasses.dataclass(frozen=True)
class TuningCandidate:
    """A backend in one direction with block sizes to try; None if it has none."""

    direction: str
    backend: str
    sizes: Any = None
    deterministic: bool = False

    def row(self) -> Row:
        """Return the row's entries for this candidate."""
        sizes = None if self.sizes is None else dataclasses.asdict(self.sizes)
        return {
            "direction": self.direction,
            "backend": self.backend,
            "blocks": sizes,
            "deterministic": self.deterministic,
        }

    def kernel(self) -> BackendPrograms:
        """Return its programs."""
        given: Row = {} if self.sizes is None else {"blocks": self.sizes}
        if self.direction == "forward":
            return BackendPrograms(self.backend, of_forward=given)
        return BackendPrograms(
            self.backend,
            of_backward=given | ({"deterministic": True} if self.deterministic else {}),
        )


def candidates(backends: Sequence[str], direction: str, head_dim: int) -> list[TuningCandidate]:
    """All that is to be tried. A backward that can be deterministic on request is tried both ways.

    A head dim without block sizes gives a candidate without sizes, which the backend will refuse.
    """
    found = []
    for backend in backends:
        sizes: list[Any] = [None]
        if backend in measurements.TUNED:
            with contextlib.suppress(KeyError):
                sizes = _sizes(backend, direction, head_dim) or [None]
        on_request = capability.CAPABILITIES[backend].deterministic == "on request"
        ways = [False, True] if direction == "backward" and on_request else [False]
        found += [TuningCandidate(direction, backend, size, way) for way in ways for size in sizes]
    return found


def _sizes(backend: str, direction: str, head_dim: int) -> list[Any]:
    if backend == "pallas_hopper":
        of = hopper.forward_candidates if direction == "forward" else hopper.backward_candidates
        return list(of(head_dim))
    which = triton.forward_candidates if direction == "forward" else triton.backward_candidates
    return list(which(head_dim, Platform.here().compute_capability))


def tune(
    shape: AttentionShape,
    backends: Sequence[str],
    dtype: str,
    repeats: int,
    log: Callable[[str], None],
) -> list[Row]:
    """Return a row per direction, backend and block size: its time, or why it was skipped."""
    asked = draw(shape, dtype)
    wanted = exactness.exact(exactness.one_group(asked, None, None)[0])
    saved: Saved | None = None
    rows: list[Row] = []
    for direction in ("forward", "backward"):
        flops, entries = shape.useful_flops(direction), {}
        programs: dict[TuningCandidate, Callable] = {}
        for candidate in candidates(backends, direction, shape.D):
            entry = entries[candidate] = conditions_of(shape, dtype) | candidate.row()
            refused = refusal(candidate.backend, asked, candidate.deterministic)
            if refused:
                entry["refused"] = refused
                continue
            log(f"{shape}: {direction}, trying {words(entry)}")
            try:
                kernel, saved = _try(candidate, asked, saved, wanted)
                programs[candidate] = kernel.program(direction, [asked], saved)
            except Exception as error:  # whatever a kernel or its compiler raises
                entry["failed"] = message(error)
        log(f"{shape}: {direction}, timing {len(programs)}")
        for candidate, found in time_interleaved(programs, repeats, AT_THE_LIMIT).items():
            row = figures(found, flops) if isinstance(found, Timing) else {"failed": message(found)}
            entries[candidate] |= row
        rows += entries.values()
    return rows


def _try(
    candidate: TuningCandidate, asked: Arrays, saved: Saved | None, wanted: tuple
) -> tuple[BackendPrograms, Saved]:
    """Run a candidate once; return its program, and the output of a correct forward pass.

    Raises:   the kernel's errors, and ValueError if the result is wrong.
    """
    kernel, grads = candidate.kernel(), None
    backward = candidate.direction == "backward"
    fresh = saved if backward and saved else jax.block_until_ready(kernel.forward([asked]))
    if backward:
        grads = jax.block_until_ready(kernel.backward([asked], fresh))[0]
    found = exactness.errors(exactness.one_group(asked, fresh[0][0], grads)[1], wanted)
    wrong = exactness.wrong(found)
    if wrong:
        raise ValueError(wrong)
    return kernel, fresh


def words(row: Row) -> str:
    """Describe backend and block sizes briefly."""
    sizes = [f"{name}={n}" for name, n in (row.get("blocks") or {}).items()]
    same = ["same bits"] if row.get("deterministic") else []
    return " ".join([row["backend"], *sizes, *same])


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest timed row of each direction, deterministic and not."""
    best: dict[tuple, Row] = {}
    for row in rows:
        key = row["direction"], row["deterministic"]
        if "ms" in row and (key not in best or row["ms"] < best[key]["ms"]):
            best[key] = row
    return list(best.values())


def hopeless(rows: Sequence[Row]) -> list[Row]:
    """Return the failed rows of backends without any working block sizes."""
    same = ("shape", "direction", "deterministic", "backend", *"BTSHGD")
    group = lambda row: tuple(row[name] for name in same)  # noqa: E731
    timed = {group(row) for row in rows if "ms" in row}
    return [row for row in rows if "failed" in row and group(row) not in timed]


def read_table(path: Path) -> Row | None:
    """Read a table; None if it does not exist.

    Raises:   ConfigError if it is damaged.
    """
    try:
        table = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _no_table(path, f"cannot be read: {error}") from error
    texts = ("gpu", "jax", "commit", "command")
    whole = isinstance(table, dict) and {"gpu", "jax", "cudnn", "rows"} <= table.keys()
    if not whole or not all(isinstance(table.get(name, ""), str) for name in texts):
        raise _no_table(path, "is no table of measurements")
    if not isinstance(table["rows"], list) or not all(isinstance(r, dict) for r in table["rows"]):
        raise _no_table(path, "has rows that are none")
    return table


def own_table(path: Path) -> Row | None:
    """Read the table of this device.

    Raises:   ConfigError if it is damaged or from another GPU.
    """
    table = read_table(path)
    if table is not None and table["gpu"] != jax.devices()[0].device_kind:
        raise _no_table(path, f"contains times of {table['gpu']!r}")
    return table


def _no_table(path: Path, rule: str) -> ConfigError:
    return ConfigError("--table", str(path), rule, "remove --table or choose a new file")


def merge(path: Path, rows: Sequence[Row], commit: str, command: str) -> str:
    """Add the timed rows to a table, and return a summary.

    Rows measured under another JAX or cuDNN are dropped: a table has one set of versions. Commits
    and commands add up.

    Raises:   ConfigError if the table is damaged or from another GPU.
    """
    device = jax.devices()[0].device_kind
    head = {"gpu": device, "jax": jax.__version__, "cudnn": conditions.cudnn_version()}
    old = own_table(path) or head | {"rows": []}
    same = all(old[name] == head[name] for name in head)
    kept = old if same else {"rows": []}
    joined = lambda name, new: " && ".join(  # noqa: E731
        dict.fromkeys([*filter(None, kept.get(name, "").split(" && ")), new])
    )
    table = {_key(row): row for row in kept["rows"]}
    new = [_table_row(row) for row in rows if "ms" in row]
    table |= {_key(row): row for row in new}
    both = {"commit": joined("commit", commit), "command": joined("command", command)}
    json_output.write("--table", path, kept | head | both | {"rows": list(table.values())})
    dropped = len(old["rows"]) - len(kept["rows"])
    said = f"{path}: {len(new)} rows measured, {len(table)} in total"
    return said + (f", {dropped} from another JAX or cuDNN dropped" if dropped else "")


def _key(row: Row) -> str:
    return json.dumps([row.get(name) for name in KEY], sort_keys=True)


def _table_row(row: Row) -> Row:
    """As `measurements.py` reads it: how many documents, and nothing that is not there."""
    row = {name: row.get(name) for name in (*KEY, "ms", "tflops")}
    row["documents"] = row["documents"] and len(row["documents"])
    optional = ("window", "documents")
    return {name: value for name, value in row.items() if value or name not in optional}
