"""Choose a step's matmul kernels at the power limit: python scripts/measure/matmul_table.py CONFIG

XLA autotunes matmul kernels in runs so short that the GPU does not reach its power limit. In
training it does, and a kernel that needs less energy may be faster. This command compiles the
config's train step and runs each of its matmuls long enough, with each kernel that XLA found nearly
as fast as its choice. It writes the best kernels to a table. Training reads the table of its GPU;
XLA autotunes matmuls that are not in it. The command needs an NVIDIA GPU and takes about five
minutes. docs/profiling.md has the details.
"""

import dataclasses
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.config import Config, ConfigError  # noqa: E402
from jaxpar.config.command_line import ConfigArguments  # noqa: E402
from jaxpar.config.lists.step_sizes import without_schedules  # noqa: E402
from jaxpar.config.options import Written, read_options  # noqa: E402
from jaxpar.monitoring import hlo as hlo  # noqa: E402
from jaxpar.runtime import exit_codes  # noqa: E402
from jaxpar.runtime.files import atomic  # noqa: E402
from jaxpar.runtime.files.outputs import check_file  # noqa: E402
from jaxpar.runtime.gpus import visible, xla_flags  # noqa: E402
from jaxpar.runtime.processes import children  # noqa: E402
from jaxpar.runtime.program import run_program  # noqa: E402
from jaxpar.runtime.stages import stage  # noqa: E402
from scripts.measure import matmul_autotuned as autotuned  # noqa: E402
from scripts.measure import matmul_products as products  # noqa: E402
from scripts.measure.matmul_autotuned import AutotunedKernel, Tried  # noqa: E402
from scripts.measure.matmul_products import Product  # noqa: E402

PROGRAM = "python scripts/measure/matmul_table.py"
SUSTAINED = str(ROOT / "scripts" / "measure" / "matmul_sustained.py")

#: Shorter matmuls (us) are left to XLA: they take little time in total, and their times are noisy.
MIN_US = 100.0
#: Kernels are tried if their short run took at most this multiple of the fastest one's.
WITHIN = 1.25
#: Most kernels to try for a matmul.
CANDIDATES = 8

HEADER = """\
# The fastest matmul kernels at the GPU's power limit. XLA reads this file when it compiles.
# Written by scripts/measure/matmul_table.py CONFIG; its --help says how they were timed.

"""

_DUMP, _LOAD = "--xla_gpu_dump_autotune_", "--xla_gpu_load_autotune_results_from="


@dataclasses.dataclass
class Matmul:
    """A matmul of a step and its measurements."""

    tried: Tried
    product: Product
    own: AutotunedKernel
    """XLA's choice."""
    times: int = 1
    """Number of occurrences in a step."""
    us: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Times at the power limit, by candidate (as text)."""

    @property
    def name(self) -> str:
        """Name of the program that runs only this matmul."""
        return f"m_{self.tried.fingerprint}"

    def rivals(self) -> list[AutotunedKernel]:
        """Return XLA's choice and the kernels that were nearly as fast in a short run."""
        fastest = self.tried.candidates[0].us
        near = [c for c in self.tried.candidates if c.us <= WITHIN * fastest]
        return [self.own, *(c for c in near if str(c) != str(self.own))]

    def best(self) -> AutotunedKernel:
        """Return the fastest kernel at the power limit."""
        by_words = {str(c): c for c in self.rivals()}
        return by_words[min(self.us, key=lambda words: statistics.mean(self.us[words]))]

    def time_of(self, candidate: AutotunedKernel) -> float | None:
        """Return a kernel's time at the power limit in us; None if it was not run."""
        times = self.us.get(str(candidate))
        return statistics.mean(times) if times else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Choose a step's matmul kernels at the power limit."""

    config: ConfigArguments
    table: Annotated[str | None, Written("FILE")] = None
    """Table to write. None: the one that training reads on this GPU."""


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    options = read_options(Options, argv, PROGRAM, __doc__)
    cfg = without_schedules(options.config.checked())
    check_file("--table", options.table)
    flags = flags_of(cfg)
    table = Path(options.table) if options.table else default_table()
    check_file("--table", str(table))
    with tempfile.TemporaryDirectory(prefix="matmuls-") as name:
        folder = Path(name)
        print_line("1 of 2: compile and run the train step with XLA's autotuning")
        found, log = matmuls_of_step(
            [options.config.name, *options.config.overrides], flags, folder
        )
        if not found:
            print_line(
                f"no matmul of at least {MIN_US:.0f} us can be run separately: nothing to tune"
            )
            return 0
        print_line(f"2 of 2: time {len(found)} matmuls with up to {CANDIDATES} kernels each")
        time_alone(found, flags, folder)
        print_line(in_words(found))
        earlier = table.read_text() if table.is_file() else ""
        step = (folder / "step.results.txt").read_text()
        try:
            table.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(table, merged(earlier, step, log, found).encode())
        except OSError as error:
            raise exit_codes.RunError(f"{table}: cannot be written: {error.strerror}") from error
    take = "" if not options.table else f"; use it with XLA_FLAGS={_LOAD}{table}"
    print_line(f"written to {table}{take}")
    return 0


def print_line(line: str) -> None:
    """Print a line of progress or results."""
    print(line, flush=True)


def default_table() -> Path:
    """Return the table that training reads on this GPU.

    Raises:   ConfigError if there is none.
    """
    gpu = visible.gpu_name() if visible.gpu_is_present() else ""
    table = xla_flags.table_of(gpu)
    if table is None:
        rule, fix = (
            "is required, since training reads no table on this device",
            "add --table runs/matmuls.textproto",
        )
        raise ConfigError("--table", None, rule, fix)
    return table


def flags_of(cfg: Config) -> str:
    """Return the XLA flags of a run, without a table.

    Raises:   ConfigError without a GPU.
    """
    if not visible.gpu_is_present():
        fix = "run it on a machine with an NVIDIA GPU"
        raise ConfigError("matmuls", "no GPU", "must run on a GPU", fix)
    given = [word for word in xla_flags.user_flags().split() if not word.startswith(_LOAD)]
    os.environ["XLA_FLAGS"] = " ".join([*given, _LOAD])
    xla_flags.apply(cfg)
    return os.environ["XLA_FLAGS"]


def _run(command: Sequence[str], flags: str, log: Path) -> None:
    """Run a Python program to completion.

    Raises:   exit_codes.RunError with the end of its output if it fails.
    """
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    started = children.start([sys.executable, *command], env, log)
    with stage(f"running python {command[0]}, whose output is in {log}"):
        try:
            code = started.wait()
        finally:
            started.end()
    if code != 0:
        raise exit_codes.RunError(f"python {' '.join(command)} failed:\n{children.tail(log)}")


def _dumping(results: Path, tried: Path) -> str:
    """Return the flags that make XLA write its table and log. Paths may contain spaces."""
    paths = [shlex.quote(str(path)) for path in (results, tried)]
    return f"{_DUMP}results_to={paths[0]} {_DUMP}logs_to={paths[1]}"


def matmuls_of_step(config: Sequence[str], flags: str, folder: Path) -> tuple[list[Matmul], str]:
    """Compile and run the config's step once, with XLA's autotuning.

    Returns:  its matmuls of at least MIN_US that can be run separately, and XLA's log.
    """
    results, tried = folder / "step.results.txt", folder / "step.tried.txt"
    programs = folder / "hlo"
    programs.mkdir()
    dumped = f"{_dumping(results, tried)} --xla_dump_to={shlex.quote(str(programs))}"
    dumped += " --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*train_step.*"
    command = ["-m", "jaxpar.profile", "--bench", *config, "--steps", "1", "--profile-steps", "0"]
    _run([*command, "--run.compilation-cache", ""], f"{flags} {dumped}", folder / "step.log")
    texts = programs.glob("*after_optimizations.txt")
    ends = sorted(texts, key=lambda file: (file.stat().st_size, file))
    if not (ends and tried.is_file() and results.is_file()):
        raise exit_codes.RunError(f"XLA wrote no log or no program of the train step to {folder}")
    log = tried.read_text()
    return joined(autotuned.read_log(log), results.read_text(), ends[-1].read_text()), log


def joined(log: Sequence[Tried], results: str, program: str) -> list[Matmul]:
    """Return the matmuls in both log and program that can be run separately, longest first."""
    module, entries = hlo.parse(program), autotuned.entries(results)
    found = []
    for tried in log:
        if len(tried.candidates) < 2 or tried.candidates[0].us < MIN_US:
            continue
        same = products.find(module, tried.line)
        if same and tried.fingerprint in entries:
            own = autotuned.choice_of(entries[tried.fingerprint])
            found.append(Matmul(tried, same[0], own, len(same)))
    return sorted(found, key=lambda matmul: -matmul.times * matmul.tried.candidates[0].us)


def time_alone(found: Sequence[Matmul], flags: str, folder: Path) -> None:
    """Time each product separately with each kernel, and fill in `us` of its matmuls."""
    asked, results = folder / "products.json", folder / "alone.results.txt"
    tried = folder / "alone.tried.txt"
    programs: dict[Product, list[Matmul]] = {}
    for matmul in found:
        programs.setdefault(matmul.product, []).append(matmul)
    of = {matmuls[0].name: matmuls for matmuls in programs.values()}
    asked.write_text(json.dumps({name: of[name][0].product.as_json() for name in of}))
    alone, plain = SUSTAINED, flags.replace(_LOAD, "")
    _run([alone, str(asked)], f"{plain} {_dumping(results, tried)}", folder / "alone.log")
    log = tried.read_text()
    rivals = {name: _rivals_alone(name, of[name], autotuned.read_log(log)) for name in of}
    for turn in range(CANDIDATES):
        takes, taken = {}, {}
        for name, (fingerprint, those) in rivals.items():
            if those:
                taken[name] = those[turn % min(len(those), CANDIDATES)]
                takes[fingerprint] = taken[name]
        entries = autotuned.vary_choices(results.read_text(), takes, autotuned.versions(log))
        table, times = folder / f"alone.{turn}.txt", folder / f"alone.{turn}.json"
        table.write_text(autotuned.text_of(entries.values()))
        taking = f"{plain} {_LOAD}{shlex.quote(str(table))}"
        _run([alone, str(asked), str(times)], taking, folder / "alone.log")
        measured = json.loads(times.read_text())
        for name, candidate in taken.items():
            for matmul in of[name]:
                if str(candidate) in map(str, matmul.rivals()):
                    matmul.us.setdefault(str(candidate), []).extend(measured[name])
        print_line(f"   {turn + 1} of {CANDIDATES}")


def _rivals_alone(
    name: str, matmuls: Sequence[Matmul], log: Sequence[Tried]
) -> tuple[str, list[AutotunedKernel]]:
    """Return the separate product's fingerprint, and the kernels it shares with these matmuls."""
    mine = [t for t in log if f"jit({name})" in t.line]
    if len(mine) != 1:
        return "", []
    known = {str(c) for c in mine[0].candidates}
    rivals = {str(c): c for matmul in matmuls for c in matmul.rivals()}
    return mine[0].fingerprint, [c for words, c in rivals.items() if words in known]


def in_words(found: Sequence[Matmul]) -> str:
    """Return a line per matmul, and the time that a step would save."""
    lines = ["us at the power limit: XLA's choice, the best kernel"]
    gain = 0.0
    for m in found:
        if not m.us:
            lines.append(f"   {m.times:3} x {m.product}: cannot be run separately")
            continue
        own, best = m.time_of(m.own), m.best()
        least = statistics.mean(m.us[str(best)])
        gain += m.times * (own - least) if own is not None else 0.0
        before = "  not run" if own is None else f"{own:9,.0f}"
        lines.append(f"   {m.times:3} x {before} {least:9,.0f}   {m.product}: {m.own}, {best}")
    return "\n".join([*lines, f"total saving per step: {gain / 1e3:.1f} ms"])


def merged(earlier: str, step: str, log: str, found: Sequence[Matmul]) -> str:
    """Return the earlier table, updated with the best kernels of these matmuls."""
    version, entries = autotuned.versions(log), autotuned.entries(step)
    table: Mapping[str, str] = autotuned.entries(earlier)
    made = {}
    for m in found:
        if not m.us:
            continue
        best, own = m.best(), m.time_of(m.own)
        beside = "" if own is None else f", XLA's choice {m.own}: {own:,.0f}"
        words = f"# {m.product}\n# {best}: {m.time_of(best):,.0f} us{beside}\n"
        made[m.tried.fingerprint] = words + autotuned.with_choice(
            entries[m.tried.fingerprint], best, version[best.backend]
        )
    return HEADER + autotuned.text_of(dict(sorted({**table, **made}.items())).values())


if __name__ == "__main__":
    run_program(main)
