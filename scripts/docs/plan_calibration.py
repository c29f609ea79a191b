"""Compare predicted and measured runs: python scripts/docs/plan_calibration.py [--write]

Prints the table; takes seconds on a CPU. --write replaces the table in docs/planning.md.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxpar.config import Config  # noqa: E402
from jaxpar.config.command_line import read_config  # noqa: E402
from jaxpar.planning.calibration import Compared, compare, compare_compiled, conditions  # noqa: E402

BEGIN, END = "<!-- calibration -->\n", "<!-- /calibration -->"


def table() -> str:
    """Return the tables of runs and of compiled steps as Markdown, with their largest errors."""
    compared = list(compare(read))
    lines = [
        "| GPUs | run | step, ms | predicted | error | peak, GiB | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
        *map(row, compared),
    ]
    times = [abs(c.time_error) for c in compared]
    peaks = [abs(c.memory_error) for c in compared if c.memory_error is not None]
    lines.append("")
    lines.append(f"Step time: {summary(times)}. Peak memory: {summary(peaks)}.")
    return "\n".join([*lines, "", *compiled_table()]) + "\n"


def compiled_table() -> list[str]:
    """Return the table of XLA's memory plans and the predictions."""
    compiled = list(compare_compiled(read))
    lines = ["| GPUs | compiled | XLA's plan, GiB | predicted | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {c.gpus} | {shorter(c.run)} | {c.gib:.1f} | {c.predicted:.1f} | {c.error:+.1%} |"
        for c in compiled
    ]
    return [*lines, "", f"Plans: {summary([abs(c.error) for c in compiled])}."]


def read(words: list[str]) -> Config:
    """Parse and check a command line's config."""
    return read_config(words, "jaxpar.plan", None)


def summary(errors: list[float]) -> str:
    """Return the number of runs, the largest and the mean error."""
    return f"{len(errors)} runs, largest error {max(errors):.1%}, mean {mean(errors):.1%}"


def mean(values: list[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def row(c: Compared) -> str:
    """Return the row of a run."""
    peak, error = c.run.peak_gib, c.memory_error
    measured = f"{peak:.1f}" if peak is not None else "-"
    memory = f"{error:+.1%}" if error is not None else "-"
    run = shorter(c.run.run)
    return (
        f"| {c.run.gpus} | {run} | {c.run.step_ms:,.0f} | {c.step_ms:,.0f} | {c.time_error:+.1%} "
        f"| {measured} | {c.peak_gib:.1f} | {memory} |"
    )


def shorter(run: str) -> str:
    """Shorten a command line by dropping the sections of the config."""
    known = {
        "llama_1b --model.tie-embeddings False": "1.5B",
        "llama3_8b --model.num-layers 8": "8 layers of 8B",
        "llama3_8b": "8B",
        "--parallel.": "",
        "--model.": "",
        "--data.document-mask False": "",
        "--train.global-batch-size": "batch",
        "--data.seq-len": "T",
    }
    for long, short in known.items():
        run = run.replace(long, short)
    return " ".join(run.split())


def main() -> None:
    """Print the table or write it to the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table to docs/planning.md")
    text = table()
    if not parser.parse_args().write:
        print(conditions() + "\n\n" + text, end="")
        return
    page = ROOT / "docs" / "planning.md"
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + text + END + after, "utf-8")


if __name__ == "__main__":
    main()
