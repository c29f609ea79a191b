"""The table of docs/benchmarks/README.md: python scripts/docs/benchmark_table.py [--write]

Read off the cards beside it, of jaxpar and of torchtitan. Printed; with --write, put into the page.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CARDS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
PAGE = CARDS / "README.md"
MARKERS = re.compile(r"(<!-- cards -->\n).*?(<!-- /cards -->)", re.DOTALL)

#: The card of torchtitan that stands beside one of ours: measured within an hour, on one host or on
#: hosts of one kind (docs/experiments/torchtitan.md).
BESIDE = {
    "llama_1.5b-h100x1-none-logits16": "torchtitan-1.5b-h100x1",
    "llama_1.5b-h200x1-none-logits16": "torchtitan-1.5b-h200x1",
    "llama3_8b-h200x2-dots_offload": "torchtitan-8b-h200x2-fsdp-recompute",
    "llama3_8b-h200x4-none": "torchtitan-8b-h200x4-fsdp",
    "llama3_8b-h200x4-float8": "torchtitan-8b-h200x4-fsdp-float8",
    "llama3_8b-h200x4-tensor2-none": "torchtitan-8b-h200x4-fsdp-tensor2",
    "llama3_8b-h200x4-pipeline2-dots": "torchtitan-8b-h200x4-data-pipeline2",
    "llama3_8b-h200x4-sequence4-131072": "torchtitan-8b-h200x4-sequence4-131072",
}

HEAD = """\
| model, window | GPUs, mesh | sequences | how | tokens/s/GPU | MFU causal, full | GiB | step, ms \
| exposed, ms | torchtitan | ratio | commit |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def cards() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of the training cards, by model and number of GPUs."""
    read = {path.stem: json.loads(path.read_text("utf-8")) for path in CARDS.glob("llama*.json")}
    order = lambda item: (item[1]["parameters"], gpus_of(item[1]), item[0])  # noqa: E731
    yield from sorted(read.items(), key=order)


def gpus_of(card: dict[str, Any]) -> int:
    """How many GPUs it was measured on."""
    return int(card["device"].split()[0]) if card["mesh"] != "1 device" else 1


def mesh_of(card: dict[str, Any]) -> str:
    """The mesh in words: FSDP is the data axis under ZeRO-3. GPUs are H200s unless they say so."""
    kind = card["device"].rpartition("NVIDIA ")[2].split()[0]
    gpus = f"{gpus_of(card)}" + (f" {kind}" if kind != "H200" else "")
    if card["mesh"] == "1 device":
        return gpus
    zero = card["config"]["parallel"]["zero"]
    words = {"data": "FSDP" if zero == 3 else "ZeRO-1, data", "replica": "replicas"}
    axes = [axis.split("=") for axis in card["mesh"].split()]
    names = [f"{words.get(name, name)} {size}" for name, size in axes]
    return f"{gpus}, {' × '.join(names)}"


def how(card: dict[str, Any]) -> str:
    """What is saved, and all that is not as usual."""
    p, m, data = (card["config"][part] for part in ("parallel", "model", "data"))
    words = [f"remat `{p['remat']}`"]
    if m.get("matmul_dtype") == "float8":
        gathers = "8-bit gathers, " if p["gather_dtype"] == "float8" else ""
        words.append(f"float8, {gathers}a scale per {m['float8_scaling']}")
    if m.get("logits_dtype") == "compute":
        words.append(f"logits in {m['dtype']}")
    if p.get("loss_chunks"):
        words.append(f"loss chunks {p['loss_chunks']}")
    for field, unit in (
        ("num_microbatches", "microbatches"),
        ("virtual_stages", "virtual stages"),
        ("row_groups", "row groups"),
    ):
        if (p.get(field) or 1) > 1:
            words.append(f"{p[field]} {unit}")
    if data["document_mask"]:
        words.append("document masking")
    return ", ".join(words)


def row(name: str, card: dict[str, Any]) -> str:
    """One card."""
    c, rate, step = card["config"], card["tokens_per_second_per_device"], card["step_seconds"]
    layers = c["model"]["num_layers"]
    model = f"{card['parameters'] / 1e9:.1f}B" + (" (8 layers of 8B)" if layers == 8 else "")
    exposed = card["profile"]["ms"]["exposed"] if "profile" in card else None
    cells = [
        f"{model}, {c['data']['seq_len']:,}",
        mesh_of(card),
        f"{c['train']['global_batch_size']}",
        how(card),
        f"[{rate:,.0f}]({name}.json)",
        f"{card['mfu_causal']:.1%}, {card['mfu_full_attention']:.1%}",
        f"{card['peak_memory_gib']:.1f}",
        f"{1e3 * step['median']:,.0f}",
        "-" if exposed is None else f"{exposed:,.0f}",
        *beside(name, rate),
        commit_of(card),
    ]
    return f"| {' | '.join(cells)} |"


def commit_of(card: dict[str, Any]) -> str:
    """The code's commit; "+" where it had changes that were not committed."""
    commit = card["commit"]
    return commit.rstrip("+")[:7] + "+" * commit.endswith("+")


def beside(name: str, rate: float) -> tuple[str, str]:
    """torchtitan's rate with a link to its card, and ours over it."""
    if name not in BESIDE:
        return "-", "-"
    card = json.loads((CARDS / f"{BESIDE[name]}.json").read_text("utf-8"))
    theirs = card["tokens_per_second_per_device"]
    return f"[{theirs:,.0f}]({BESIDE[name]}.json)", f"{rate / theirs:.2f}"


def table() -> str:
    """All cards, as Markdown."""
    return HEAD + "".join(f"{row(name, card)}\n" for name, card in cards())


def main(argv: list[str]) -> None:
    """The command line."""
    if argv not in ([], ["--write"]):
        sys.exit(__doc__)
    made = table()
    print(made, end="")
    if argv:
        text = PAGE.read_text("utf-8")
        PAGE.write_text(MARKERS.sub(lambda found: found[1] + made + found[2], text), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
