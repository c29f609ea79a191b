"""Compare predicted and measured runs: python scripts/docs/plan_calibration.py [--write]

Prints the tables; takes seconds on a CPU. --write replaces those in docs/planning.md.
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
EXPERTS_BEGIN, EXPERTS_END = "<!-- calibration-experts -->\n", "<!-- /calibration-experts -->"


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


def experts_table() -> str:
    """Return the table of runs of models with experts as Markdown."""
    compared = list(compare(read, "experts"))
    lines = [
        "| GPUs | run | step, ms | predicted | error | peak, GiB | predicted | error | code |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"{row(c, f' {c.run.gpu.upper()}')} {of_experts(c)} |" for c in compared]
    return "\n".join(lines) + "\n"


def of_experts(c: Compared) -> str:
    """Return the part of a run's source that says with which code it was measured."""
    return c.run.source.partition("; ")[2] or c.run.source


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


def row(c: Compared, kind: str = "") -> str:
    """Return the row of a run.

    Args:     kind: of GPU, to print after their number.
    """
    peak, error = c.run.peak_gib, c.memory_error
    measured = f"{peak:.1f}" if peak is not None else "-"
    memory = f"{error:+.1%}" if error is not None else "-"
    run, gpus = shorter(c.run.run), f"{c.run.gpus}{kind}"
    return (
        f"| {gpus} | {run} | {c.run.step_ms:,.0f} | {c.step_ms:,.0f} | {c.time_error:+.1%} "
        f"| {measured} | {c.peak_gib:.1f} | {memory} |"
    )


def shorter(run: str) -> str:
    """Shorten a command line by dropping the sections of the config."""
    known = {
        "llama_1b --model.tie-embeddings False": "1.5B",
        "llama3_8b --model.num-layers 8": "8 layers of 8B",
        "llama3_8b": "8B",
        "qwen3_30b_a3b --model.num-layers 6": "6 layers of Qwen3-30B-A3B",
        "mixtral_8x7b --model.num-layers 4": "4 layers of Mixtral 8x7B",
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
    """Print the tables or write them to the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/planning.md")
    tables = ((BEGIN, table(), END), (EXPERTS_BEGIN, experts_table(), EXPERTS_END))
    if not parser.parse_args().write:
        print("\n\n".join([conditions(), *(text for _, text, _ in tables)]), end="")
        return
    page = ROOT / "docs" / "planning.md"
    for begin, text, end in tables:
        before, _, rest = page.read_text("utf-8").partition(begin)
        _, _, after = rest.partition(end)
        page.write_text(before + begin + text + end + after, "utf-8")


if __name__ == "__main__":
    main()
