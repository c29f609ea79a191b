"""Choose a step's matmul kernels at the power limit: python -m jaxpar.bench matmuls CONFIG [...]

XLA times the kernels of each matmul when it compiles, in runs so short that the GPU's power limit
does not bite. In training it does, and another kernel may need less energy and so less time. This
compiles the config's train step, runs each of its matmuls alone for long enough with each of the
kernels that XLA found nearly as fast as its choice, and writes the best into a table. Training
takes the table that belongs to its GPU; XLA tunes what is not in it. Needs an NVIDIA GPU; takes
some five minutes. docs/benchmarking.md says more.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxpar.bench.matmuls import autotuned, products
from jaxpar.bench.matmuls.autotuned import AutotunedKernel, Tried
from jaxpar.bench.matmuls.products import Product
from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import read_config
from jaxpar.profiling.hlo import text as hlo
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import atomic
from jaxpar.runtime.gpus import visible, xla_flags
from jaxpar.runtime.options import Parser, check_file, check_folder
from jaxpar.runtime.processes import children

#: Matmuls that are shorter, us, are left to XLA: together they are little, and their times uneven.
MIN_US = 100.0
#: A kernel is tried whose short run took at most so much of the fastest one's.
WITHIN = 1.25

HEADER = """\
# Kernels of matmuls that need least time at the GPU's power limit; XLA reads this when it compiles.
# Written by python -m jaxpar.bench matmuls CONFIG, which says how they were timed.

"""

_DUMP, _LOAD = "--xla_gpu_dump_autotune_", "--xla_gpu_load_autotune_results_from="


@dataclasses.dataclass
class Matmul:
    """One of a step's matmuls, and what is known of it."""

    tried: Tried
    product: Product
    own: AutotunedKernel
    """What XLA took."""
    times: int = 1
    """How often it is in a step."""
    us: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Times at the power limit, by candidate in words."""

    @property
    def name(self) -> str:
        """Of the program that runs it alone."""
        return f"m_{self.tried.fingerprint}"

    def rivals(self) -> list[AutotunedKernel]:
        """What XLA took, and what was nearly as fast in a short run."""
        fastest = self.tried.candidates[0].us
        near = [c for c in self.tried.candidates if c.us <= WITHIN * fastest]
        return [self.own, *(c for c in near if str(c) != str(self.own))]

    def best(self) -> AutotunedKernel:
        """The one with the least time at the power limit."""
        by_words = {str(c): c for c in self.rivals()}
        return by_words[min(self.us, key=lambda words: statistics.mean(self.us[words]))]

    def time_of(self, candidate: AutotunedKernel) -> float | None:
        """Its time at the power limit, us; None if it was not run."""
        times = self.us.get(str(candidate))
        return statistics.mean(times) if times else None


def read_command(argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """The options of the benchmark itself, and the config with its overrides."""
    parser = Parser("python -m jaxpar.bench matmuls", __doc__)
    add = parser.add_argument
    add("--candidates", type=int, default=8, help="kernels to try of each matmul, at most (8)")
    add("--table", help="table to write into (the one that training on this GPU reads)")
    add("--keep", metavar="DIR", help="folder for what the programs wrote")
    options, rest = parser.parse_known_args(argv)
    options.config = rest
    if options.candidates < 2:
        fix = "use --candidates 8"
        raise ConfigError("--candidates", options.candidates, "must be at least 2", fix)
    cfg = read_config(rest, "jaxpar.bench matmuls", __doc__)
    check_file("--table", options.table)
    check_folder("--keep", options.keep)
    return options, cfg


def main(argv: Sequence[str]) -> int:
    """The command line."""
    options, cfg = read_command(argv)
    flags = flags_of(cfg)
    table = Path(options.table) if options.table else default_table()
    check_file("--table", str(table))
    with _folder(options.keep) as folder:
        print_line("1 of 2: the train step, as XLA tunes it")
        found, log = matmuls_of_step(options.config, flags, folder)
        if not found:
            print_line(
                f"no matmul of {MIN_US:.0f} us and more that can be run alone: nothing to choose"
            )
            return 0
        print_line(f"2 of 2: {len(found)} matmuls with up to {options.candidates} kernels each")
        time_alone(found, flags, folder, options.candidates)
        print_line(in_words(found))
        earlier = table.read_text() if table.is_file() else ""
        step = (folder / "step.results.txt").read_text()
        try:
            table.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(table, merged(earlier, step, log, found).encode())
        except OSError as error:
            raise exit_codes.RunError(f"{table}: cannot be written: {error.strerror}") from error
    take = "" if not options.table else f"; take it with XLA_FLAGS={_LOAD}{table}"
    print_line(f"written to {table}{take}")
    return 0


def print_line(line: str) -> None:
    """A line about how far it is, or what was found."""
    print(line, flush=True)


def default_table() -> Path:
    """The table that training on this GPU reads.

    Raises:   ConfigError where there is none.
    """
    gpu = visible.gpu_name() if visible.gpu_is_present() else ""
    table = xla_flags.table_of(gpu)
    if table is None:
        rule, fix = "must be given where training reads none", "add --table runs/matmuls.textproto"
        raise ConfigError("--table", None, rule, fix)
    return table


def flags_of(cfg: Config) -> str:
    """XLA's flags of a run, without a table.

    Raises:   ConfigError without a GPU.
    """
    if not visible.gpu_is_present():
        fix = "run it on a machine with an NVIDIA GPU"
        raise ConfigError("matmuls", "no GPU", "kernels are timed on one", fix)
    given = [word for word in xla_flags.user_flags().split() if not word.startswith(_LOAD)]
    os.environ["XLA_FLAGS"] = " ".join([*given, _LOAD])
    xla_flags.apply(cfg)
    return os.environ["XLA_FLAGS"]


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="matmuls-") as folder:
            yield Path(folder)
    else:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep)


def _run(command: Sequence[str], flags: str, log: Path) -> None:
    """Run a program of ours to its end.

    Raises:   guard.RunError with the end of what it said when it fails.
    """
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    started = children.start([sys.executable, "-m", *command], env, log)
    ended = children.Children([started], grace=5.0).wait()
    if ended.get(0) != 0:
        raise exit_codes.RunError(f"python -m {' '.join(command)} failed:\n{children.tail(log)}")


def _dumping(results: Path, tried: Path) -> str:
    """The flags that have XLA write its table and its log; a path may have spaces."""
    paths = [shlex.quote(str(path)) for path in (results, tried)]
    return f"{_DUMP}results_to={paths[0]} {_DUMP}logs_to={paths[1]}"


def matmuls_of_step(config: Sequence[str], flags: str, folder: Path) -> tuple[list[Matmul], str]:
    """Compile and run the config's step once, as XLA tunes it.

    Returns:  its matmuls, of LEAST_US and more, that can be run alone; and XLA's log.
    """
    results, tried = folder / "step.results.txt", folder / "step.tried.txt"
    programs = Path(tempfile.mkdtemp(prefix="hlo-", dir=folder))  # an earlier one's may be there
    dumped = f"{_dumping(results, tried)} --xla_dump_to={shlex.quote(str(programs))}"
    dumped += " --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*train_step.*"
    command = ["jaxpar.bench", "train", *config, "--steps", "1", "--profile-steps", "0"]
    _run([*command, "--run.compilation-cache", ""], f"{flags} {dumped}", folder / "step.log")
    ends = sorted(programs.glob("*after_optimizations.txt"), key=lambda file: file.stat().st_size)
    if not (ends and tried.is_file() and results.is_file()):
        raise exit_codes.RunError(f"XLA left no log, or no program, of the train step in {folder}")
    log = tried.read_text()
    return joined(autotuned.read_log(log), results.read_text(), ends[-1].read_text()), log


def joined(log: Sequence[Tried], results: str, program: str) -> list[Matmul]:
    """The matmuls of a log that are in a program and can be run alone, longest first."""
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


def time_alone(found: Sequence[Matmul], flags: str, folder: Path, candidates: int) -> None:
    """Run each product alone with one kernel after another; `us` of its matmuls is filled in."""
    asked, results = folder / "products.json", folder / "alone.results.txt"
    tried = folder / "alone.tried.txt"
    programs: dict[Product, list[Matmul]] = {}
    for matmul in found:
        programs.setdefault(matmul.product, []).append(matmul)
    of = {matmuls[0].name: matmuls for matmuls in programs.values()}
    asked.write_text(json.dumps({name: of[name][0].product.as_json() for name in of}))
    alone, plain = "jaxpar.bench.matmuls.sustained", flags.replace(_LOAD, "")
    _run([alone, str(asked)], f"{plain} {_dumping(results, tried)}", folder / "alone.log")
    log = tried.read_text()
    rivals = {name: _rivals_alone(name, of[name], autotuned.read_log(log)) for name in of}
    for turn in range(candidates):
        takes, taken = {}, {}
        for name, (fingerprint, those) in rivals.items():
            if those:
                taken[name] = those[turn % min(len(those), candidates)]
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
        print_line(f"   {turn + 1} of {candidates}")


def _rivals_alone(
    name: str, matmuls: Sequence[Matmul], log: Sequence[Tried]
) -> tuple[str, list[AutotunedKernel]]:
    """The fingerprint of the product that is run alone, and those of its kernels that these
    matmuls of the step could take as well."""
    mine = [t for t in log if f"jit({name})" in t.line]
    if len(mine) != 1:
        return "", []
    known = {str(c) for c in mine[0].candidates}
    rivals = {str(c): c for matmul in matmuls for c in matmul.rivals()}
    return mine[0].fingerprint, [c for words, c in rivals.items() if words in known]


def in_words(found: Sequence[Matmul]) -> str:
    """What was found, a line for each matmul, and what a step would gain."""
    lines = ["us at the power limit, of XLA's choice and of the best"]
    gain = 0.0
    for m in found:
        if not m.us:
            lines.append(f"   {m.times:3} x {m.product}: cannot be run alone as it is in the step")
            continue
        own, best = m.time_of(m.own), m.best()
        least = statistics.mean(m.us[str(best)])
        gain += m.times * (own - least) if own is not None else 0.0
        before = "  not run" if own is None else f"{own:9,.0f}"
        lines.append(f"   {m.times:3} x {before} {least:9,.0f}   {m.product}: {m.own}, {best}")
    return "\n".join([*lines, f"together {gain / 1e3:.1f} ms of a step"])


def merged(earlier: str, step: str, log: str, found: Sequence[Matmul]) -> str:
    """A table with the best kernels of these matmuls, and what was in it of others."""
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
