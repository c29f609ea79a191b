"""Inject faults into copies of the package, and record what finds each.

    python -m tests.mutants                     all, and write results.json and the table of docs/
    python -m tests.mutants NAME ... --jobs 4   some, by name or by what their names contain
    python -m tests.mutants --missing           those without a result, or whose tests did not run
    python -m tests.mutants --clean             the same commands on the package without a fault
    python -m tests.mutants --list

A fault changes one to six lines (`faults/`). `jaxpar.certify` runs on a copy that has it, with the
config, mesh and options that should find it, up to the first comparison that fails; then the tests
that it names. Results are written as they come, and others are kept. With --clean nothing is
written.

Exit codes: 0 all ran (also if some were not found), 1 a run failed, or with --clean found anything.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.conftest import compile_quickly
from tests.mutants import table
from tests.mutants.every import every_fault, likeliest_checks, read_results, record
from tests.mutants.fault import ROOT, Fault
from tests.mutants.running import (
    Result,
    RunFailed,
    certified,
    copy_with,
    passes_test,
    run,
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    asked = _options(args)
    faults = _chosen(asked)
    if not faults:
        print("no such fault: see --list")
        return 1
    if asked.list:
        for fault in faults:
            print(f"{fault.name:58} {fault.source:22} {fault.certify}")
        return 0
    if asked.page:
        table.write()
        return 0
    compile_quickly()
    os.environ["JAX_PLATFORMS"] = "cpu"
    failed = _clean(faults, asked) if asked.clean else _inject(faults, asked)
    print("\n".join(failed))
    return 1 if failed else 0


def _chosen(asked: argparse.Namespace) -> list[Fault]:
    """Return the faults to run. A name that is not a fault's stands for all that contain it."""
    faults = every_fault()
    names = {fault.name for fault in faults}
    if asked.names:
        whole = {name for name in asked.names if name in names}
        parts = set(asked.names) - whole
        faults = [
            fault
            for fault in faults
            if fault.name in whole or any(part in fault.name for part in parts)
        ]
    if asked.missing:
        done = {name for name, one in read_results().items() if one.found_by or one.tested}
        faults = [fault for fault in faults if fault.name not in done]
    return faults


def _options(args: Sequence[str] | None) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults, or parts of their names")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--missing", action="store_true", help="only faults without a result")
    parser.add_argument("--no-tests", action="store_true", help="run the command alone")
    parser.add_argument("--clean", action="store_true", help="without a fault: all must pass")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument("--list", action="store_true", help="list the faults")
    return parser.parse_args(args)


def _inject(faults: list[Fault], asked: argparse.Namespace) -> list[str]:
    """Run faults, record results, write the table. Returns:  what failed to run."""
    show = ("git", "log", "-1", "--format=%h", "--", "jaxpar", "configs")
    commit = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True)
    began, failed = time.monotonic(), list[str]()
    with ThreadPoolExecutor(max(asked.jobs, 1)) as pool:
        head = commit.stdout.strip()

        def one(fault: Fault) -> Result:
            return run(fault, head, likeliest_checks(fault), tests=not asked.no_tests)

        runs = [pool.submit(one, fault) for fault in faults]
        for number, done in enumerate(as_completed(runs), 1):
            try:
                result = done.result()
            except RunFailed as error:
                failed.append(str(error))
                print(f"{number}/{len(runs)} FAILED {error}", flush=True)
                continue
            record(result)
            took = f"{result.seconds:.0f} CPU s; {time.monotonic() - began:.0f} s in all"
            by = " ".join(filter(None, (result.found_by, result.check)))
            what = f"{by}: {result.line}" if by else "NOT FOUND"
            print(f"{number}/{len(runs)} {result.name}: {what} ({took})", flush=True)
    table.write()
    return failed


def _clean(faults: list[Fault], asked: argparse.Namespace) -> list[str]:
    """Run each command and each test once, without a fault. Returns:  those that did not pass."""

    def command(fault: Fault) -> str:
        with copy_with([]) as root:
            found, line, seconds, _ = certified(root, fault)
        print(f"{fault.certify}: {found or 'passes'} {line} ({seconds:.0f} CPU s)", flush=True)
        return f"without a fault: {fault.certify}: {found}: {line}" if found else ""

    def test(name: str) -> str:
        with copy_with([]) as root:
            passes, seconds = passes_test(root, name)
        print(f"{name}: {'passes' if passes else 'FAILS'} ({seconds:.0f} CPU s)", flush=True)
        return "" if passes else f"without a fault: {name} fails"

    commands = {fault.certify: fault for fault in faults}.values()
    names = dict.fromkeys(name for fault in faults for name in fault.tests)
    with ThreadPoolExecutor(max(asked.jobs, 1)) as pool:
        found = [*pool.map(command, commands), *([] if asked.no_tests else pool.map(test, names))]
    return list(filter(None, found))


if __name__ == "__main__":
    sys.exit(main())
