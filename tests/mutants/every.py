"""All faults, and what became of each: `results.json`."""

import dataclasses
import fcntl
import importlib
import json
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
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
