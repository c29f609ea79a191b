"""All faults, and what became of each: `results.json`."""

import dataclasses
import fcntl
import importlib
import json
from collections import Counter
from os.path import commonpath
from pathlib import Path

from tests.mutants.fault import Fault
from tests.mutants.running import HOME, Result

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"


def every_fault() -> list[Fault]:
    """Return the faults of each file in `faults`, in the order of the files."""
    modules = sorted(file.stem for file in (HERE / "faults").glob("*.py"))
    found = (importlib.import_module(f"tests.mutants.faults.{name}") for name in modules)
    return [fault for module in found for fault in module.FAULTS]


def read_results(file: Path = RESULTS) -> dict[str, Result]:
    """Return the recorded results of faults as they are now, by their names: not those of faults
    that are gone, or whose command is another one now."""
    found = json.loads(file.read_text("utf-8")) if file.is_file() else []
    now = {(fault.name, fault.certify) for fault in every_fault()}
    results = (Result(**one) for one in found)
    return {one.name: one for one in results if (one.name, one.certify) in now}


def record(result: Result, file: Path = RESULTS) -> None:
    """Record a result, beside other programs that do: one a line."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "results.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read_results(file) | {result.name: result}
        lines = (json.dumps(dataclasses.asdict(results[name])) for name in sorted(results))
        new = file.with_suffix(".new")
        new.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
        new.replace(file)  # at once: others read it


#: The checks of the command that take a few CPU seconds at most, the quickest first.
QUICK = ("schedule", "initial weights", "optimizer", "data order")


def likeliest_checks(fault: Fault, file: Path = RESULTS) -> list[str]:
    """Return names of checks in the order in which a fault needs the least time to be found: first
    those that found faults of the same file, of the same folder, and so on; then quick ones."""
    faults, finds = {one.name: one for one in every_fault()}, Counter(dict.fromkeys(QUICK, 0))
    for name, result in read_results(file).items():
        if result.check and name != fault.name:
            shared = commonpath([fault.file, faults[name].file]).count("/")
            finds[result.check] += 100**shared
    return [name for name, _ in finds.most_common()]
