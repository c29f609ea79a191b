"""The tables of docs/choosing_a_layout.md: python scripts/docs/layout_tables.py [--write]

Each row is the first layout of a plan; its options are in the row. On a CPU, two minutes for all.
Printed; with --write, put into the page between the markers of each table.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxpar.planning.command import read_command  # noqa: E402
from jaxpar.planning.layouts import describe  # noqa: E402
from jaxpar.planning.predict.hardware import GIB  # noqa: E402
from jaxpar.planning.ranking import Layout, make_plan  # noqa: E402

PAGE = ROOT / "docs" / "choosing_a_layout.md"

#: Of each table: what all of its plans have in common, and (what a row asks, options).
TABLES = {
    "sizes": (
        "--quick",
        [
            ("Llama 3.2 1B", "llama_1b --gpus 8 --train.global-batch-size 64"),
            ("Llama 3 8B", "llama3_8b --gpus 8 --train.global-batch-size 64"),
            ("Llama 3 70B", "llama3_70b --gpus 64"),
            ("Llama 3.1 405B", "llama3_405b --gpus 384"),
        ],
    ),
    "host": (
        "llama3_8b --gpus 8 --train.global-batch-size 64",
        [
            ("anything", ""),
            ("ZeRO-3", "--fix zero=3"),
            ("everything recomputed", "--fix remat=full"),
            ("context parallelism", "--fix sequence=8"),
            ("a pipeline", "--fix pipeline=2"),
            ("tensor parallelism", "--fix tensor=2"),
            ("tensor over the host", "--fix tensor=8"),
        ],
    ),
    "shapes": (
        "llama3_8b --gpus 8 --quick",
        [
            ("8 rows a GPU", "--train.global-batch-size 64"),
            ("a row a GPU", "--train.global-batch-size 8"),
            ("half a row a GPU", "--train.global-batch-size 4"),
            ("one row in all", "--train.global-batch-size 1"),
            ("windows of 131,072", "--data.seq-len 131072 --train.global-batch-size 8"),
            ("80 GB a GPU", "--gpu h100 --train.global-batch-size 64"),
        ],
    ),
    "hosts": (
        "llama3_70b --gpus 64 --quick",
        [
            ("anything", ""),
            ("no pipeline", "--fix pipeline=1"),
            ("tensor over the host", "--fix tensor=8"),
            ("80 GB a GPU", "--gpu h100"),
        ],
    ),
}


def first_layout(command: str) -> Layout:
    """The fastest layout that fits."""
    asked = read_command(command.split())
    made = make_plan(asked.cfg, asked.cluster, asked.fixed, coarse=asked.options.quick)
    return made.fitting[0]


def table(name: str) -> str:
    """A table as Markdown, under the command that its rows add to."""
    program, (common, rows) = "python -m jaxpar.plan ", TABLES[name]
    beside = "beside the first | " if any("--fix" in options for _, options in rows) else ""
    lines = [
        f"Options beside `{common if common.startswith('--') else program + common}`:",
        "",
        f"| | mesh | ZeRO | remat | M | GiB | tokens/s/GPU | MFU | {beside}options |",
        "|---" * (10 if beside else 9) + "|",
    ]
    best = None
    for what, options in rows:
        words = sorted([common, options], key=lambda text: text.startswith("--"))  # CONFIG first
        layout = first_layout(" ".join(words))
        best = best or layout.time.rate
        p = layout.cfg.parallel
        fixed = "--fix" in options
        versus = f"{layout.time.rate / best - 1:+.0%}" if fixed else ""
        cells = [what, describe(layout.cfg), str(p.zero), p.remat, str(p.num_microbatches)]
        cells += [f"{layout.memory.total / GIB:.0f}", f"{layout.time.rate:,.0f}"]
        cells += [f"{layout.time.mfu:.1%}", *([versus] if beside else [])]
        cells += [f"`{options}`" if options else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables, or write them into the page."""
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
