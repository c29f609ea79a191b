"""All faults, and what became of each: `results.json`."""

import dataclasses
import importlib
import json
from pathlib import Path

from tests.mutants.fault import Fault
from tests.mutants.running import Result

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"


def every_fault() -> list[Fault]:
    """Return the faults of each file in `faults`, in the order of the files."""
    modules = sorted(file.stem for file in (HERE / "faults").glob("*.py"))
    found = (importlib.import_module(f"tests.mutants.faults.{name}") for name in modules)
    return [fault for module in found for fault in module.FAULTS]


def read_results(file: Path = RESULTS) -> dict[str, Result]:
    """Return the recorded results, by the faults' names."""
    found = json.loads(file.read_text("utf-8")) if file.is_file() else []
    return {one["name"]: Result(**one) for one in found}


def write_results(results: dict[str, Result], file: Path = RESULTS) -> None:
    """Record results: one a line."""
    lines = (json.dumps(dataclasses.asdict(results[name])) for name in sorted(results))
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
