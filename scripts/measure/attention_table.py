"""Write the attention table of this GPU: python scripts/measure/attention_table.py [--shapes ...]

Times each candidate of block sizes of jaxpar's kernels, and cuDNN, forward and backward, at the
GPU's power limit. `auto` chooses a backend and its block sizes from the table. docs/profiling.md
has the details.
"""

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.config import Config, ConfigError  # noqa: E402
from jaxpar.config.json_reader import read_json  # noqa: E402
from jaxpar.config.options import Written, read_options  # noqa: E402
from jaxpar.config.rules import limits  # noqa: E402
from jaxpar.kernels.attention import capability, choice  # noqa: E402
from jaxpar.kernels.attention.hopper import blocks as hopper  # noqa: E402
from jaxpar.kernels.attention.triton import blocks as triton  # noqa: E402
from jaxpar.kernels.platform import Platform  # noqa: E402
from jaxpar.runtime import exit_codes, provenance  # noqa: E402
from jaxpar.runtime import start as runtime  # noqa: E402
from jaxpar.runtime.files import outputs  # noqa: E402
from jaxpar.runtime.files.outputs import check_file  # noqa: E402
from jaxpar.runtime.processes import rendezvous  # noqa: E402
from jaxpar.runtime.program import run_program  # noqa: E402
from jaxpar.tools.bench import conditions  # noqa: E402
from scripts.measure import attention_shapes as exactness  # noqa: E402
from scripts.measure.attention_shapes import (  # noqa: E402
    NAMED,
    Arrays,
    AttentionShape,
    BackendPrograms,
    Saved,
    draw,
    parse_shapes,
)
from scripts.measure.interleaved import Sustained, Timing, time_interleaved  # noqa: E402

PROGRAM = "python scripts/measure/attention_table.py"
BACKENDS = tuple(capability.CAPABILITIES)
DTYPE = "bfloat16"

type Row = dict[str, Any]

#: The folder of the tables, one per kind of GPU.
TABLES = Path(choice.__file__).parent / "measured"

#: Candidates are timed at the power limit, as in a step.
AT_THE_LIMIT = Sustained(settle=0.2, timed=0.4)

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
    return TABLES / choice.file_name(device.device_kind)


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
        if backend in choice.TUNED:
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
    repeats: int,
) -> list[Row]:
    """Return a row per direction, backend and block size: its time, or why it was skipped."""
    asked = draw(shape, DTYPE)
    wanted = exactness.exact(exactness.one_group(asked, None, None)[0])
    saved: Saved | None = None
    rows: list[Row] = []
    for direction in ("forward", "backward"):
        flops, entries = shape.useful_flops(direction), {}
        programs: dict[TuningCandidate, Any] = {}
        for candidate in candidates(backends, direction, shape.D):
            entry = entries[candidate] = conditions_of(shape) | candidate.row()
            refused = refusal(candidate.backend, asked, candidate.deterministic)
            if refused:
                entry["refused"] = refused
                continue
            log(f"{shape}: {direction}, trying {words(entry)}")
            try:
                kernel, saved = attempt(candidate, asked, saved, wanted)
                programs[candidate] = kernel.program(direction, asked, saved)
            except Exception as error:  # whatever a kernel or its compiler raises
                entry["failed"] = message(error)
        log(f"{shape}: {direction}, timing {len(programs)}")
        for candidate, found in time_interleaved(programs, repeats, AT_THE_LIMIT).items():
            row = figures(found, flops) if isinstance(found, Timing) else {"failed": message(found)}
            entries[candidate] |= row
        rows += entries.values()
    return rows


def attempt(
    candidate: TuningCandidate, asked: Arrays, saved: Saved | None, wanted: tuple
) -> tuple[BackendPrograms, Saved]:
    """Run a candidate once; return its program, and the output of a correct forward pass.

    Raises:   the kernel's errors, and ValueError if the result is wrong.
    """
    kernel, grads = candidate.kernel(), None
    backward = candidate.direction == "backward"
    fresh = saved if backward and saved else jax.block_until_ready(kernel.forward(asked))
    if backward:
        grads = jax.block_until_ready(kernel.backward(asked, fresh))
    found = exactness.errors(exactness.one_group(asked, fresh[0], grads)[1], wanted)
    wrong = exactness.wrong(found)
    if wrong:
        raise ValueError(wrong)
    return kernel, fresh


def refusal(backend: str, asked: Arrays, deterministic: bool) -> str:
    """Return why a backend does not support a shape; empty if it does."""
    here = Platform.here()
    request = capability.make_request(
        "backward", asked.q, asked.k, asked.mask, here, deterministic=deterministic
    )
    return capability.refusal(backend, request) or ""


def message(error: Exception) -> str:
    """Format an error in one line."""
    said = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def conditions_of(shape: AttentionShape) -> Row:
    """Return a row's entries for the shape."""
    row: Row = {"shape": shape.name, "kind": shape.kind, **shape.size, "dtype": DTYPE}
    if shape.documents:
        row["documents"] = list(shape.documents)
    return row | ({"window": shape.window} if shape.window else {})


def figures(found: Timing, flops: float) -> Row:
    """Return a time and its rate."""
    spread = {"ms_fastest": found.fastest, "ms_slowest": found.slowest, "launches": found.launches}
    return {"ms": found.ms, **spread, "useful_flops": flops, "tflops": flops / found.ms / 1e9}


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
    outputs.write_json("--table", path, kept | head | both | {"rows": list(table.values())})
    dropped = len(old["rows"]) - len(kept["rows"])
    said = f"{path}: {len(new)} rows measured, {len(table)} in total"
    return said + (f", {dropped} from another JAX or cuDNN dropped" if dropped else "")


def _key(row: Row) -> str:
    return json.dumps([row.get(name) for name in KEY], sort_keys=True)


def _table_row(row: Row) -> Row:
    """As `choice.py` reads it: how many documents, and nothing that is not there."""
    row = {name: row.get(name) for name in (*KEY, "ms", "tflops")}
    row["documents"] = row["documents"] and len(row["documents"])
    optional = ("window", "documents")
    return {name: value for name, value in row.items() if value or name not in optional}


# ------------------------------------------------------------------------------------ command


def log(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Write the attention table of this GPU."""

    shapes: Annotated[tuple[str, ...], Written("SHAPE")] = tuple(NAMED)
    """Kinds, separated by commas: causal, packed, window, zigzag. Or B,T,H,G,D or KIND:B,T,H,G,D.
    """
    backends: Annotated[str | None, Written("A,B")] = None
    """Backends to try. None: all for this device."""
    table: Annotated[str | None, Written("FILE")] = None
    """Table to write or update. None: the one of this GPU."""
    repeats: Annotated[int, limits.REPEATS] = REPEATS
    """Batches of a candidate."""


def checked(options: Options) -> tuple[list[AttentionShape], list[str]]:
    """Return the shapes, and the backends; none: all for this device.

    Raises:   ConfigError for an unknown shape or backend, or a damaged table.
    """
    shapes = parse_shapes(options.shapes)
    backends = [] if options.backends is None else options.backends.split(",")
    for name in backends:
        if name not in BACKENDS:
            rule = f"{name!r} is not one of {', '.join(BACKENDS)}"
            raise ConfigError("--backends", options.backends, rule, "use only those")
    if options.table is not None:
        check_file("--table", options.table)
        read_table(Path(options.table))
    return shapes, backends


def main(argv: Sequence[str]) -> int:
    """Run the command line; return 1 if a supported backend has no working block sizes."""
    options = read_options(Options, argv, PROGRAM, __doc__)
    shapes, backends = checked(options)
    rendezvous.require_single_process(PROGRAM)
    runtime.start(Config())
    table = Path(options.table) if options.table else default_table()
    own_table(table)
    on_gpu = jax.devices()[0].platform == "gpu"
    able = capability.CAPABILITIES
    backends = backends or [name for name in able if able[name].needs_gpu == on_gpu]
    commit, command = provenance.checked_out_commit(), shlex.join([*PROGRAM.split(), *argv])
    failed = []
    for shape in shapes:
        rows = tune(shape, backends, options.repeats)
        for row in rows:
            why = [row[name] for name in ("refused", "failed") if name in row]
            print(f"{row['direction']:9} {words(row)}: {why[0] if why else f'{row["ms"]:.3f} ms'}")
        for row in fastest(rows):
            print(f"fastest {row['direction']}: {words(row)}, {row['tflops']:.1f} TFLOP/s")
        print(merge(table, rows, commit, command), flush=True)
        failed += hopeless(rows)
    return exit_codes.EXIT_ERROR if failed else exit_codes.EXIT_OK


if __name__ == "__main__":
    run_program(main)
