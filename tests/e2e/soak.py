"""Long trials: 50 kills, and every way to go on in another mesh and number of processes.

    python -m tests.e2e.soak             both (`make soak`)
    python -m tests.e2e.soak matrix      a run saved in each of 6 meshes and 1, 2 and 4 processes
                                         goes on in each of them: 324 resumes
    python -m tests.e2e.soak kills       runs of 2 and of 4 processes, killed again and again

Real programs on simulated CPU devices; needs the package and its dependencies, no pytest. Settings
are variables of the environment:

    SOAK_JOBS    trials at a time (1): up to 5 processes each, of one core when they work
    SOAK_PART    i/n: every nth pair of the matrix, from the ith on, counted from 1 (1/1)
    SOAK_KILLS   kills of runs of 2 and of runs of 4 processes, each (50)
    SOAK_RUNS    runs that share them (5)
    SOAK_OUT     file to which a line for each trial is appended (soak.tsv in the temporary folder)

A line has: trial, outcome, seconds, and what was found. The last ones sum it up. Ends with 1 if a
trial did not come out as it must.
"""

import collections
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import ranks
from tests.e2e import soak_kills, soak_matrix


@dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    jobs: int
    part: tuple[int, int]
    kills: int
    runs: int
    out: Path | None

    @classmethod
    def read(cls) -> "Settings":
        """From the variables above."""
        number = lambda name, default: int(os.environ.get(name, default))  # noqa: E731
        first, _, parts = os.environ.get("SOAK_PART", "1/1").partition("/")
        out = os.environ.get("SOAK_OUT")
        made = cls(
            jobs=number("SOAK_JOBS", "1"),
            part=(int(first), int(parts)),
            kills=number("SOAK_KILLS", "50"),
            runs=number("SOAK_RUNS", "5"),
            out=Path(out) if out else None,
        )
        if not 1 <= made.part[0] <= made.part[1] or min(made.jobs, made.runs) < 1:
            raise SystemExit(f"these settings cannot be: {made}")
        return made


class Table:
    """The lines of the trials, written as they come, from any thread."""

    def __init__(self, file: Path):
        self._file, self._lock = file, threading.Lock()
        self.failed: list[str] = []
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)

    def log(self, text: str) -> None:
        """A line, to the file and to the terminal."""
        with self._lock, open(self._file, "a", encoding="utf-8") as file:
            file.write(text + "\n")
            print(text, flush=True)

    def trial(self, kind: str, name: str, work: Callable[[], str]) -> str | None:
        """Do a trial and write its line. Returns what it found, None where it went wrong."""
        began = time.monotonic()
        try:
            found, outcome = work(), "ok"
        except Exception as error:  # whatever it is, the others go on
            found, outcome = f"{type(error).__name__}: {error}"[-2000:], "FAILED"
            self.failed.append(name)
        seconds = time.monotonic() - began
        self.seconds[kind].append(seconds)
        self.log("\t".join((name, outcome, f"{seconds:.1f}", found.replace("\n", " | "))))
        return found if outcome == "ok" else None


type Trial = tuple[str, Callable[[], str]]


def in_parallel(table: Table, jobs: int, kind: str, trials: Iterable[Trial]) -> list[str]:
    """Do trials, so many at a time. Returns what those that went well have found."""
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda trial: table.trial(kind, *trial), trials))
    return [text for text in found if text is not None]


def matrix(settings: Settings, table: Table, folder: Path) -> None:
    """Every pair of this part; what they begin with comes first."""
    trials = soak_matrix.Matrix(ranks.write_config(folder))
    first, parts = settings.part
    pairs = list(itertools.product(soak_matrix.PLACES, repeat=2))[first - 1 :: parts]
    begins = dict.fromkeys(before for before, _ in pairs)
    wholes = dict.fromkeys(place.mesh for pair in pairs for place in pair)
    todo: list[Trial] = [(f"whole {mesh}", lambda m=mesh: trials.whole(m)) for mesh in wholes]
    todo += [(f"begin {place}", lambda p=place: trials.begin(p)) for place in begins]
    in_parallel(table, settings.jobs, "whole, begin", todo)
    todo = [(f"{a} -> {b}", lambda a=a, b=b: trials.goes_on(a, b)) for a, b in pairs]
    found = in_parallel(table, settings.jobs, "pair", todo)
    same = [text for text in found if text == soak_matrix.SAME_BITS]
    furthest = max((float(text.split()[-1]) for text in found if text not in same), default=0.0)
    table.log(
        f"# {len(found)} of {len(pairs)} pairs go on: {len(same)} on their mesh with the same bits,"
        f" {len(found) - len(same)} on others with losses within {furthest:.1e} of theirs"
    )


def kills(settings: Settings, table: Table, folder: Path) -> None:
    """Runs of 2 and of 4 processes, killed at random."""
    each = [settings.kills // settings.runs] * settings.runs
    each = [n + (i < settings.kills % settings.runs) for i, n in enumerate(each)]
    trials = soak_kills.Kills(ranks.write_config(folder), max(each))
    table.trial("whole", "whole for kills", trials.whole)
    todo: list[Trial] = [
        (f"{n} kills of {count}, run {i}", lambda n=n, c=count, i=i: trials.killed(c, n, i))
        for i, n in enumerate(each, 1)
        for count in (4, 2)
    ]
    in_parallel(table, settings.jobs, "killed run", todo)
    for count, phases in sorted(trials.phases.items()):
        told = ", ".join(f"{phase} {phases[phase]}" for phase in soak_kills.PHASES)
        table.log(f"# {sum(phases.values())} kills with {count} processes: {told}")


PARTS = {"kills": kills, "matrix": matrix}


def main(argv: Sequence[str]) -> int:
    """The command line."""
    if set(argv) - PARTS.keys():
        print(__doc__)
        return 2
    settings = Settings.read()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        base = Path(temporary)
        table = Table(settings.out or Path(tempfile.gettempdir()) / "soak.tsv")
        began = time.monotonic()
        for name in argv or PARTS:
            (base / name).mkdir()
            PARTS[name](settings, table, base / name)
        for kind, seconds in table.seconds.items():
            median, longest = statistics.median(seconds), max(seconds)
            table.log(f"# {kind}: {len(seconds)}, median {median:.1f} s, longest {longest:.1f} s")
        took = f"{time.monotonic() - began:.0f} s, {settings.jobs} at a time"
        table.log(f"# {len(table.failed)} failed, in {took}")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
