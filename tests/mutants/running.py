"""Runs what should find a fault, on a copy of the package that has it."""

import ast
import fcntl
import itertools
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.mutants.fault import ROOT, Fault

#: The command that should find a fault, and what runs it as far as the first failure.
CERTIFY = ("-m", "jaxpar.certify")
FIRST_FAILURE = ("-m", "tests.mutants.first_failure")

#: Exit codes of that command: all agree; a mismatch.
AGREES, DIFFERS = 0, 1

#: What a copy has. Others are links: tests read the repository that they are in.
COPIED, LINKED = ("jaxpar", "configs"), ("tests", "docs", "scripts", "pyproject.toml", "README.md")

#: Where copies are, compiled modules, and what tests keep.
HOME = ROOT / ".pytest_cache" / "mutants"

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


def run(
    fault: Fault, prefix: str, commit: str, passed: str, first: Sequence[str], *, tests: bool
) -> Result:
    """Run the command, and where it finds nothing the tests.

    Args:     prefix: what precedes each command, such as "nice". passed: how the command is known
              to find nothing; "" to run it. first: its checks, the likeliest first. tests: False to
              leave them out.
    Raises:   RunFailed.
    """
    check = ""
    with copy_with([fault]) as root:
        if passed:
            found, line, seconds = "", passed, 0.0
        else:
            found, line, seconds, check = certified(root, fault, prefix, first)
        tested = tests and not found
        for test in fault.tests if tested else ():
            passes, took = passes_test(root, test, prefix)
            seconds += took
            if not passes:
                found, line = "test", test
                break
    return Result(fault.name, found, line, tested, round(seconds, 1), commit, fault.certify, check)


def passes_test(root: Path, test: str, prefix: str) -> tuple[bool, float]:
    """Return whether a test passes in a copy, and CPU seconds. Raises: RunFailed."""
    code, text, seconds = execute(root, prefix, "-m", "pytest", *PYTEST, test)
    if code not in (0, 1):
        raise RunFailed(f"pytest {test}: exit code {code}\n{text[-2000:]}")
    return code == 0, seconds


def passing_together(faults: Sequence[Fault], prefix: str) -> dict[str, str]:
    """Run the command once with several faults of one `certify`: if it passes, it finds none. If
    not, do the same with each half of them.

    Returns:  how the command is known to find nothing, by the faults' names; without those of
              which that is not known.
    """
    together: list[Fault] = []
    for fault in faults:
        try:
            with copy_with([*together, fault]):
                together.append(fault)
        except ValueError:
            continue  # it changes what another one has changed
    if len(together) < 2:
        return {}
    with copy_with(together) as root:
        found, *_ = certified(root, together[0], prefix)
    if not found:
        why = f"passed together with {len(together) - 1} others"
        return {fault.name: why for fault in together}
    half = len(together) // 2
    return passing_together(together[:half], prefix) | passing_together(together[half:], prefix)


#: Options of pytest: slow tests too, since they are named.
PYTEST = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu")


def certified(
    root: Path, fault: Fault, prefix: str, first: Sequence[str] = ()
) -> tuple[Finder, str, float, str]:
    """Return what the command found, the line that says so, CPU seconds, and its check.

    Args:     first: checks, the likeliest first.
    """
    args = *FIRST_FAILURE, ",".join(first), *fault.command
    code, text, seconds = execute(root, prefix, *args)
    begun = re.findall(r"^check: (.*)$", text, re.MULTILINE) or [""]
    if code == AGREES:
        return "", "passed", seconds, ""
    if "Traceback (most recent call last)" in text and "ImportError" not in text:
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


def execute(root: Path, prefix: str, *args: str) -> tuple[int, str, float]:
    """Run Python in a copy. Returns:  its exit code, its output, and the CPU seconds it took."""
    env = dict(os.environ, PYTHONPATH=str(root), JAX_PLATFORMS="cpu", JAX_TRACEBACK_FILTERING="off")
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["PYTHONPYCACHEPREFIX"] = str(HOME / "modules")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = subprocess.Popen(
            [*shlex.split(prefix), sys.executable, *args],
            cwd=root,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=_limit,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return process.returncode, out.read(), usage.ru_utime + usage.ru_stime


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS + 10))
