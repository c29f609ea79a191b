"""Makes the tables of docs/planning.md: python scripts/docs/layout_tables.py [--write]

Each row is the best layout of a plan, with the plan's options and the closest card of
docs/benchmarks. All rows take three minutes on a CPU. Without options, prints the tables. --write
writes them to the page.
"""

import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmark_table import CARDS, mesh_of  # noqa: E402

from jaxpar.commands import read  # noqa: E402
from jaxpar.prediction.hardware import GIB  # noqa: E402
from jaxpar.prediction.layouts import describe  # noqa: E402
from jaxpar.prediction.ranking import Layout, make_plan  # noqa: E402
from jaxpar.tools.planning.command import asked_for  # noqa: E402

PAGE = ROOT / "docs" / "planning.md"

#: Of each table: the options that all of its plans share, and (row, options, the nearest card).
TABLES = {
    "sizes": (
        "--quick",
        [
            (
                "1B on 1 GPU",
                "llama_1b --gpus 1 --train.global-batch-size 16",
                "llama_1.5b-h200x1-none",
            ),
            (
                "1B on 8 GPUs",
                "llama_1b --gpus 8 --train.global-batch-size 64",
                "llama_1.5b-h200x4-zero1-none",
            ),
            (
                "8B on 2 GPUs",
                "llama3_8b --gpus 2 --train.global-batch-size 16",
                "llama3_8b-h200x2-none-logits16",
            ),
            (
                "8B on 8 GPUs",
                "llama3_8b --gpus 8 --train.global-batch-size 64",
                "llama3_8b-h200x4-none-limit6",
            ),
            (
                "8B on 8 GPUs of 80 GB",
                "llama3_8b --gpus 8 --gpu h100 --train.global-batch-size 64",
                "",
            ),
            ("8B on 64 GPUs", "llama3_8b --gpus 64 --train.global-batch-size 512", ""),
            ("70B on 64 GPUs", "llama3_70b --gpus 64", ""),
            ("405B on 384 GPUs", "llama3_405b --gpus 384", ""),
        ],
    ),
    "host": (
        "llama3_8b --gpus 8 --train.global-batch-size 64",
        [
            ("the fastest", "", ""),
            ("ZeRO-3", "--fix zero=3", "llama3_8b-h200x4-dots"),
            ("full recomputation", "--fix remat=full", ""),
            ("context parallelism", "--fix sequence=8", ""),
            ("pipeline", "--fix pipeline=2", "llama3_8b-h200x4-pipeline2-dots"),
            ("tensor over 2 GPUs", "--fix tensor=2", "llama3_8b-h200x4-tensor2-none"),
            ("tensor over 8 GPUs", "--fix tensor=8", ""),
        ],
    ),
    "shapes": (
        "llama3_8b --gpus 8 --quick",
        [
            ("1 sequence per GPU", "--train.global-batch-size 8", ""),
            ("1 sequence per 2 GPUs", "--train.global-batch-size 4", ""),
            ("1 sequence in all", "--train.global-batch-size 1", ""),
            (
                "sequences of 131,072",
                "--data.seq-len 131072 --train.global-batch-size 8",
                "llama3_8b-h200x4-sequence4-131072",
            ),
        ],
    ),
    "hosts": (
        "llama3_70b --gpus 64 --quick",
        [
            ("the fastest", "", ""),
            ("no pipeline", "--fix pipeline=1", ""),
            ("tensor over the host", "--fix tensor=8", ""),
            ("GPUs of 80 GB", "--gpu h100", ""),
        ],
    ),
    "experts": (
        "qwen3_30b_a3b --gpus 8 --quick",
        [
            ("the fastest", "", ""),
            ("experts gathered by FSDP", "--fix expert=1", ""),
            ("expert axis of 2", "--fix expert=2", ""),
            ("expert axis of 8", "--fix expert=8", ""),
            ("pipeline", "--fix pipeline=8", ""),
        ],
    ),
    "mixtures": (
        "--quick",
        [
            ("Qwen3-30B-A3B, unbalanced", "qwen3_30b_a3b --gpus 8 --expert-imbalance 1.5", ""),
            (
                "Qwen3-30B-A3B, 8 sequences per GPU",
                "qwen3_30b_a3b --gpus 8 --train.global-batch-size 64",
                "",
            ),
            ("Mixtral 8x7B", "mixtral_8x7b --gpus 8", ""),
            ("OLMoE on 2 GPUs", "olmoe_1b_7b --gpus 2 --train.global-batch-size 8", ""),
            ("OLMoE on 8 GPUs", "olmoe_1b_7b --gpus 8", ""),
        ],
    ),
}


def first_layout(command: str) -> Layout:
    """Return the fastest layout that fits."""
    asked = asked_for(read("plan", command.split()))
    quick, load = asked.options.quick, asked.options.expert_imbalance
    made = make_plan(asked.cfg, asked.cluster, asked.fixed, coarse=quick, imbalance=load)
    return made.fitting[0]


def measured(name: str) -> str:
    """Return the rate of a card, with its devices."""
    if not name:
        return ""
    card = json.loads((CARDS / f"{name}.json").read_text("utf-8"))
    rate, remat = card["tokens_per_second_per_device"], card["config"]["parallel.remat"]
    link = f"[{rate:,.0f}](benchmarks/{name}.json)"
    return f"{link} on {mesh_of(card, named=True)}, remat {remat.replace(',', ', ')}"


def table(name: str) -> str:
    """Return a table as Markdown, below the command that its rows extend."""
    program, (common, rows) = "python -m jaxpar.plan ", TABLES[name]
    versus = any("--fix" in options for _, options, _ in rows)
    cards = any(card for *_, card in rows)
    head = ["", "mesh", "ZeRO", "remat", "M", "GiB", "tokens/s/GPU", "MFU"]
    head += ["vs. fastest"] * versus + ["nearest card"] * cards + ["options"]
    added = f"Each row adds its options to `{program}CONFIG {common}`:"
    if not common.startswith("--"):
        added = f"Each row adds its options to `{program}{common}`:"
    lines = [added, "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    best = None
    for what, options, card in rows:
        words = sorted([common, options], key=lambda text: text.startswith("--"))  # CONFIG first
        layout = first_layout(" ".join(words))
        best = best or layout.time.rate
        p = layout.cfg.parallel
        cells = [what, describe(layout.cfg), str(p.zero), p.remat, str(p.num_microbatches)]
        cells += [f"{layout.memory.total / GIB:.0f}", f"{layout.time.rate:,.0f}"]
        cells += [f"{layout.time.mfu:.1%}"]
        if versus:
            cells += [f"{layout.time.rate / best - 1:+.0%}" if "--fix" in options else ""]
        cells += [measured(card)] * cards + [f"`{options}`" if options else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables or write them to the page."""
    text = PAGE.read_text("utf-8")
    for name in TABLES:
        made = table(name)
        print(made)
        pattern = rf"(<!-- layouts: {name} -->\n).*?(<!-- /layouts -->)"
        text = re.sub(pattern, lambda m, made=made: m[1] + made + m[2], text, flags=re.DOTALL)
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
