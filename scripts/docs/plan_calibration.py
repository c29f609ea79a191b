"""Compare predicted and measured runs: python scripts/docs/plan_calibration.py [--write]

Prints each run, and what pages say of all; takes seconds on a CPU. --write writes that to the pages
of BLOCKS.
"""

import argparse
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmark_table import with_blocks  # noqa: E402
from calibration import Compared, compare, compare_compiled, conditions  # noqa: E402

from jaxpar.config import Config  # noqa: E402
from jaxpar.config.command_line import read_config  # noqa: E402
from jaxpar.config.validate import resolve  # noqa: E402
from jaxpar.prediction.communication import Cluster  # noqa: E402
from jaxpar.prediction.hardware import GIB, GPUS, NETWORKS  # noqa: E402
from jaxpar.prediction.ranking import predict  # noqa: E402
from jaxpar.runtime.units import duration  # noqa: E402
from jaxpar.tools.planning.questions import cost_of  # noqa: E402


@functools.cache
def dense() -> list[Compared]:
    """Return the runs of dense models with their predictions."""
    return list(compare(read))


@functools.cache
def experts() -> list[Compared]:
    """Return the runs of models with experts with their predictions."""
    return list(compare(read, "experts"))


def errors() -> tuple[list[float], list[float]]:
    """Return relative errors of dense models: of step times, and of peaks where they were noted."""
    peaks = [abs(c.memory_error) for c in dense() if c.memory_error is not None]
    return [abs(c.time_error) for c in dense()], peaks


def accuracy() -> str:
    """Return in a sentence how far predictions were from measured runs."""
    times, peaks = errors()
    return (
        f"On one host, step times were within {max(times):.1%} of {len(times)} measured runs, and "
        f"memory within {max(peaks):.1%} of {len(peaks)}"
    )


def of_readme() -> str:
    """Return the README's item on the planner."""
    return (
        "- **Plan before you run.** `python -m jaxpar.plan` predicts the memory and step time of "
        f"every layout on a CPU. {accuracy()}.\n"
    )


def of_layouts() -> str:
    """Return the item on the page about choosing a layout."""
    return f"- {accuracy()} ([comparison](#predicted-and-measured)).\n"


def recipe() -> str:
    """Return what the planner predicts of the README's recipe, from the commands there."""
    text = (ROOT / "README.md").read_text("utf-8").replace("\\\n", " ")
    words = {
        command: shlex.split(
            re.search(rf"^python -m jaxpar\.{command} (llama_1b .*)$", text, re.M)[1]
        )
        for command in ("plan", "train")
    }
    option = lambda name: words["plan"][words["plan"].index(name) + 1]  # noqa: E731
    gpus, gpu, tokens = int(option("--gpus")), GPUS[option("--gpu")], float(option("--tokens"))
    cluster = Cluster(gpu, NETWORKS["ib400"], gpus, gpu.per_host)
    layout = predict(resolve(read(words["train"]), gpus), cluster)
    cost = cost_of(layout, cluster, tokens)
    return (
        f"The planner predicts {duration(cost.seconds)} for {tokens:,.0f} tokens with the options "
        f"below on {gpus} {gpu.name.upper()}s, and {layout.memory.total / GIB:.0f} GiB per GPU.\n"
    )


def kind(c: Compared) -> str:
    """Return the row of the pages' table to which a run belongs."""
    if c.run in (known.run for known in experts()):
        return f"experts, {c.run.gpu.upper()}"
    p = resolve(read(c.run.run.split()), c.run.gpus).parallel
    kinds = {
        "pipeline": p.pipeline > 1,
        "tensor": p.tensor > 1,
        "sequence": p.sequence > 1,
        "float8": "float8" in c.run.run,
        "one GPU": c.run.gpus == 1,
    }
    return next((name for name, is_so in kinds.items() if is_so), "`data`, `replica`")


def table() -> str:
    """Return the errors of the runs by kind, and of compiled steps, as Markdown."""
    by_kind: dict[str, list[Compared]] = {}
    for c in [*dense(), *experts()]:
        by_kind.setdefault(kind(c), []).append(c)
    lines = [
        "| runs with | runs | step time: largest error | mean | peak: largest error | mean |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in by_kind.items():
        peaks = [c.memory_error for c in runs if c.memory_error is not None]
        times = spread([c.time_error for c in runs])
        lines.append(f"| {name} | {len(runs)} | {times} | {spread(peaks)} |")
    plans = [c.error for c in compare_compiled(read)]
    lines.append(f"| XLA's memory plans of compiled steps | {len(plans)} | | | {spread(plans)} |")
    return "\n".join(lines) + "\n"


def spread(errors: list[float]) -> str:
    """Return two cells: the largest error, and the mean without signs."""
    sizes = [abs(error) for error in errors]
    return f"{max(errors, key=abs):+.1%} | {sum(sizes) / len(sizes):.1%}"


def runs_table() -> str:
    """Return each run and its prediction as Markdown."""
    lines = [
        "| GPUs | run | step, ms | predicted | peak, GiB | predicted |",
        "|---|---|---|---|---|---|",
    ]
    lines += [row(c, f" {c.run.gpu.upper()}") for c in [*dense(), *experts()]]
    return "\n".join(lines) + "\n"


def compiled_table() -> str:
    """Return the table of XLA's memory plans and the predictions."""
    lines = ["| GPUs | compiled | XLA's plan, GiB | predicted | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {c.gpus} | {shorter(c.run)} | {c.gib:.1f} | {c.predicted:.1f} | {c.error:+.1%} |"
        for c in compare_compiled(read)
    ]
    return "\n".join(lines) + "\n"


def read(words: list[str]) -> Config:
    """Parse and check a command line's config."""
    return read_config(words)


def row(c: Compared, gpu: str) -> str:
    """Return the row of a run.

    Args:     gpu: its kind, to print after their number.
    """
    peak, error = c.run.peak_gib, c.memory_error
    measured = f"{peak:.1f}" if peak is not None else "-"
    memory = f"{error:+.1%}" if error is not None else f"{c.peak_gib:.1f} GiB"
    run, gpus = shorter(c.run.run), f"{c.run.gpus}{gpu}"
    return (
        f"| {gpus} | {run} | {c.run.step_ms:,.0f} | {c.time_error:+.1%} | {measured} | {memory} |"
    )


def shorter(run: str) -> str:
    """Shorten a command line by dropping the sections of the config."""
    known = {
        "llama_1b --model.tie-embeddings False": "1.5B",
        "llama3_8b --model.num-layers 8": "8 layers of 8B",
        "llama3_8b": "8B",
        "qwen3_30b_a3b --model.num-layers 6": "6 layers of Qwen3-30B-A3B",
        "mixtral_8x7b --model.num-layers 4": "4 layers of Mixtral 8x7B",
        "--model.layers.feed-forward.router.balancing-bias True": "router bias",
        "--parallel.": "",
        "--model.": "",
        "--compute.": "",
        "logits-dtype compute": "logits16",
        "--data.document-mask False": "",
        "--train.global-batch-size": "batch",
        "--data.seq-len": "T",
    }
    for long, short in known.items():
        run = run.replace(long, short)
    return " ".join(run.split())


#: Of each page, what stands between `<!-- NAME -->` and `<!-- /NAME -->`.
BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/planning.md": {"calibration": table, "planner": of_layouts},
    "README.md": {"planner": of_readme, "recipe": recipe},
}


def filled(page: str) -> str:
    """Return a page with its tables and sentences made again."""
    return with_blocks(page, (ROOT / page).read_text("utf-8"), BLOCKS[page])


def main() -> None:
    """Print the tables and sentences, or write them to the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them to the pages")
    write = parser.parse_args().write
    for page, blocks in BLOCKS.items():
        if write:
            (ROOT / page).write_text(filled(page), "utf-8")
        else:
            print(conditions() + "\n" if page.endswith("planning.md") else f"\n{page}")
            print("\n".join(make() for make in blocks.values()), end="")
    if not write:
        print("\n" + runs_table() + "\n" + compiled_table(), end="")


if __name__ == "__main__":
    main()
