"""Runs what should find a fault, on a copy of the package that has it."""

import ast
import fcntl
import itertools
import multiprocessing
import os
import re
import resource
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from tests.mutants.fault import ROOT, Fault

#: The command that should find a fault, and what runs it as far as the first failure.
CERTIFY = ("-m", "jaxpar.certify")
FIRST_FAILURE = "tests.mutants.first_failure"

#: Exit codes of that command: all agree; a mismatch.
AGREES, DIFFERS = 0, 1

#: What a copy has. Others are links: tests read the repository that they are in.
COPIED, LINKED = ("jaxpar", "configs"), ("tests", "docs", "scripts", "pyproject.toml", "README.md")

#: Where copies are, compiled modules, and what tests keep.
HOME = ROOT / ".pytest_cache" / "mutants"
MODULES = HOME / "modules"

#: CPU seconds after which a run is stopped: it has not found the fault.
MOST_SECONDS = 600

#: What found a fault: an error when the step is traced, or when it runs; the command; a test. ""
#: if nothing did, and "not run".
type Finder = Literal["traced", "crashed", "certify", "test", "", "not run"]


@dataclass(frozen=True)
class Result:
    """What became of a fault."""

    name: str
    found_by: Finder
    line: str = ""
    """The line that says so; of a test, its name. If nothing found it, how the command passed."""
    tested: bool = False
    """Whether its tests were run, too."""
    seconds: float = 0.0
    """CPU seconds of all runs."""
    commit: str = ""
    """The last one that had changed the package."""
    certify: str = ""
    """`Fault.certify` of the run."""
    check: str = ""
    """The check of the command that found it."""


class RunFailed(Exception):
    """A run that says nothing about the fault, as with options that the command refuses."""


@contextmanager
def copy_with(faults: Sequence[Fault]) -> Iterator[Path]:
    """Yield a folder with a copy of the package that has these faults.

    Raises:   ValueError for a fault that cannot be applied, or not after those before it.
    """
    changed = {fault.file: (ROOT / fault.file).read_text("utf-8") for fault in faults}
    for fault in faults:
        changed[fault.file] = fault.applied(changed[fault.file])
    for name, text in changed.items():
        ast.parse(text, name)
    with _free_folder() as root:
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in LINKED:
            (root / name).symlink_to(ROOT / name)
        (HOME / "pytest").mkdir(exist_ok=True)
        (root / ".pytest_cache").symlink_to(HOME / "pytest")
        for name, text in changed.items():
            (root / name).write_text(text, "utf-8")
        yield root


@contextmanager
def _free_folder() -> Iterator[Path]:
    """Yield an empty folder that no other run has, with a name that was used before: modules that
    are as they were, most of them, are then not compiled again."""
    HOME.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        with (HOME / f"{number}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            root = HOME / str(number)
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            yield root
            return


def run(fault: Fault, commit: str, first: Sequence[str], *, tests: bool) -> Result:
    """Run the command, and where it finds nothing the tests.

    Args:     first: the command's checks, the likeliest first. tests: False to leave them out.
    Raises:   RunFailed.
    """
    with copy_with([fault]) as root:
        found, line, seconds, check = certified(root, fault, first)
        tested = tests and not found
        for test in fault.tests if tested else ():
            passes, took = passes_test(root, test)
            seconds += took
            if not passes:
                found, line = "test", test
                break
    return Result(fault.name, found, line, tested, round(seconds, 1), commit, fault.certify, check)


def passes_test(root: Path, test: str) -> tuple[bool, float]:
    """Return whether a test passes in a copy, and CPU seconds. Raises: RunFailed."""
    code, text, seconds = execute(root, "pytest", *PYTEST, test)
    if code not in (0, 1):
        raise RunFailed(f"pytest {test}: exit code {code}\n{text[-2000:]}")
    return code == 0, seconds


#: Options of pytest: slow tests too, since they are named.
PYTEST = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu")


def certified(
    root: Path, fault: Fault, first: Sequence[str] = ()
) -> tuple[Finder, str, float, str]:
    """Return what the command found, the line that says so, CPU seconds, and its check.

    Args:     first: checks, the likeliest first.
    """
    code, text, seconds = execute(root, FIRST_FAILURE, ",".join(first), *fault.command)
    begun = re.findall(r"^check: (.*)$", text, re.MULTILINE) or [""]
    if code == AGREES:
        return "", "passed", seconds, ""
    missing = re.search(r"ImportError|ModuleNotFoundError", text)
    if "Traceback (most recent call last)" in text and not missing:
        lines = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
        line = _shortened(lines[-1] if lines else text.splitlines()[-1])
        return "traced", line, seconds, begun[-1]
    if code == DIFFERS:
        wrong = [line for line in text.splitlines() if re.search(r"\boff by\b|\bdiffer\b", line)]
        telling = min(wrong, key=lambda line: "gradient of" not in line)
        return "certify", telling.partition(": ")[2], seconds, begun[-1]
    if code == -signal.SIGXCPU:
        return "", f"passed nothing in {MOST_SECONDS} CPU seconds", seconds, ""
    if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE):
        line = f"exit code {code}: {text.strip().splitlines()[-1]}"
        return "crashed", line, seconds, begun[-1]
    raise RunFailed(f"{fault.name}: {shlex.join(fault.command)}: exit code {code}\n{text[-2000:]}")


def _shortened(line: str) -> str:
    """Leave out the middle of a long line: errors of JAX name functions with all they are given."""
    return line if len(line) <= 160 else f"{line[:60]} ... {line[-90:]}"


#: Packages that no fault changes: runs are forked from a process that has imported them.
OF_OTHERS = ["jax", "numpy", "optax", "orbax.checkpoint", "flax.struct", "flax.traverse_util"]


def execute(root: Path, module: str, *args: str) -> tuple[int, str, float]:
    """Run a module in a copy. Returns:  its exit code, its output, and the CPU seconds it took."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(OF_OTHERS)
    with tempfile.NamedTemporaryFile("w+", encoding="utf-8") as out:
        here, there = forked.Pipe(duplex=False)
        process = forked.Process(target=_run, args=(there, root, out.name, module, *args))
        process.start()
        code, seconds = here.recv()
        process.join()
        return code, out.read(), seconds


def _run(ended: Connection, root: Path, output: str, module: str, *args: str) -> None:
    """Run a module as a program in a process, and send its exit code and CPU seconds."""
    if child := os.fork():
        _, status, usage = os.wait4(child, 0)
        ended.send((os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime))
        return
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS + 10))
    os.chdir(root)
    sys.path[0] = str(root)
    sys.argv, sys.pycache_prefix, sys.dont_write_bytecode = ["", *args], str(MODULES), False
    here = {"PYTHONPATH": str(root), "PYTHONPYCACHEPREFIX": str(MODULES)}
    os.environ.update(here, JAX_TRACEBACK_FILTERING="off")
    with open(output, "a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)
