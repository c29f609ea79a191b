"""Makes the tables and sentences on benchmarks: python scripts/docs/benchmark_table.py [OPTION]

The figures are from the cards of jaxpar and torchtitan in docs/benchmarks. Without options, prints
what it makes, and the table of other cards, which only the site has. --write writes it to the pages
of BLOCKS. --check exits with code 1 if one differs.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CARDS = ROOT / "docs" / "benchmarks"

#: The card of torchtitan to compare with one of ours: measured within an hour, on one host or on
#: hosts of one kind (docs/experiments.md#comparisons-with-torchtitan).
BESIDE = {
    "llama_1.5b-h100x1-none-logits16": "torchtitan-1.5b-h100x1",
    "llama_1.5b-h200x1-none-logits16": "torchtitan-1.5b-h200x1",
    "llama3_8b-h200x2-dots_offload": "torchtitan-8b-h200x2-fsdp-recompute",
    "llama3_8b-h200x4-none": "torchtitan-8b-h200x4-fsdp",
    "llama3_8b-h200x4-float8": "torchtitan-8b-h200x4-fsdp-float8",
    "llama3_8b-h200x4-tensor2-none": "torchtitan-8b-h200x4-fsdp-tensor2",
    "llama3_8b-h200x4-pipeline2-dots": "torchtitan-8b-h200x4-data-pipeline2",
    "llama3_8b-h200x4-sequence4-131072": "torchtitan-8b-h200x4-sequence4-131072",
    "qwen3_30b_a3b_6_layers-h100x2-expert2": "torchtitan-qwen3_30b_a3b_6_layers-h100x2",
    "qwen3_30b_a3b_6_layers-h200x2-expert2": "torchtitan-qwen3_30b_a3b_6_layers-h200x2",
    "qwen3_30b_a3b_6_layers-h200x2-fsdp": "torchtitan-qwen3_30b_a3b_6_layers-h200x2",
    "qwen3_30b_a3b-h200x8-expert4": "torchtitan-qwen3_30b_a3b-h200x8-recompute",
    "qwen3_30b_a3b_24_layers-h200x4-expert4": (
        "torchtitan-qwen3_30b_a3b_24_layers-h200x4-recompute"
    ),
    "qwen3_30b_a3b_24_layers-h200x4-fsdp": "torchtitan-qwen3_30b_a3b_24_layers-h200x4-recompute",
    "olmoe_1b_7b-h200x2-expert2": "torchtitan-olmoe_1b_7b-h200x2",
    "olmoe_1b_7b-h200x4-expert4": "torchtitan-olmoe_1b_7b-h200x4",
    "mixtral_8x7b_4_layers-h100x2-expert2": "torchtitan-mixtral_8x7b_4_layers-h100x2",
    "mixtral_8x7b_4_layers-h100x2-tensor2": "torchtitan-mixtral_8x7b_4_layers-h100x2",
}

#: Those of the README.
FEW = [
    "llama_1.5b-h100x1-none-logits16",
    "llama3_8b-h200x4-none",
    "llama3_8b-h200x4-float8",
    "llama3_8b-h200x4-sequence4-131072",
    "qwen3_30b_a3b_6_layers-h200x2-expert2",
]

#: Recurrent mixers, by their letters on older cards.
RECURRENT = {"G": "GatedDeltaNet", "K": "KimiDeltaAttention", "M": "Mamba2"}

HEAD = """\
| model, sequence length | GPUs, mesh | options | tokens/s/GPU | MFU, causal | GiB | step, ms |
|---|---|---|---|---|---|---|
"""


def cards() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of the training cards, by model and number of GPUs."""
    paths = (path for path in CARDS.glob("*.json") if not path.stem.startswith("torchtitan"))
    read = {path.stem: json.loads(path.read_text("utf-8")) for path in paths}
    read = {name: card for name, card in read.items() if "parameters" in card}
    order = lambda item: (item[1]["parameters"], gpus_of(item[1]), item[0])  # noqa: E731
    yield from sorted(read.items(), key=order)


def gpus_of(card: dict[str, Any]) -> int:
    """Return the number of GPUs of a card."""
    return int(card["device"].split()[0]) if card["mesh"] != "1 device" else 1


def mesh_of(card: dict[str, Any], named: bool = False) -> str:
    """Describe the mesh. The data axis is FSDP under ZeRO-3. named: also name H200s."""
    kind = card["device"].rpartition("NVIDIA ")[2].split()[0]
    gpus = f"{gpus_of(card)}" + (f" {kind}" if named or kind != "H200" else "")
    if card["mesh"] == "1 device":
        return gpus
    zero = card["config"]["parallel.zero"]
    words = {"data": "FSDP" if zero == 3 else "ZeRO-1, data", "replica": "replicas"}
    axes = [axis.split("=") for axis in card["mesh"].split()]
    names = [f"{words.get(name, name)} {size}" for name, size in axes]
    return f"{gpus}, {' × '.join(names)}"


def how(card: dict[str, Any]) -> str:
    """Describe the remat policy and the other non-default options."""
    c = card["config"]
    words = [f"remat `{c['parallel.remat']}`"]
    if is_float8(card):
        gathers = "8-bit gathers, " if c["parallel.gather_dtype"] == "float8" else ""
        words.append(f"float8, {gathers}a scale per {c['compute.float8_scaling']}")
    if c.get("compute.logits_dtype") == "compute":
        words.append(f"logits in {c['compute.dtype']}")
    if c.get("parallel.loss_chunks"):
        words.append(f"loss chunks {c['parallel.loss_chunks']}")
    for field, unit in (
        ("num_microbatches", "microbatches"),
        ("virtual_stages", "virtual stages"),
        ("row_groups", "row groups"),
    ):
        if (c.get(f"parallel.{field}") or 1) > 1:
            words.append(f"{c[f'parallel.{field}']} {unit}")
    if c["parallel.expert"] > 1 and of_layers(c, "num_experts"):
        words.append(f"expert slack {c['parallel.expert_slack']}")
    if recurrences(c):
        words.append(f"recurrences by {c['compute.recurrent_backend']}")
    if (rule := c["optimizer.name"]) != "adamw":
        words.append(rule.capitalize())
    if c["data.document_mask"]:
        words.append("document masking")
    return ", ".join(words)


def model_of(card: dict[str, Any]) -> str:
    """Describe the number of parameters and the sequence length."""
    name = name_of(card)
    cut = f" ({name})" if name else ""
    return f"{card['parameters'] / 1e9:.1f}B{cut}, {card['config']['data.seq_len']:,}"


def name_of(card: dict[str, Any]) -> str:
    """Return the name of a model with experts or with fewer layers than published, or ''."""
    c = card["config"]
    of, experts = f"{c['model.num_layers']} layers of", of_layers(c, "num_experts")
    recurrent = recurrences(c)
    if of_layers(c, "kv_lora_rank"):
        return f"{of} DeepSeek-V3 with {experts} experts"
    if "GatedDeltaNet" in recurrent:
        return f"{of} Qwen3-Next with {experts} experts"
    if "Mamba2" in recurrent:
        return f"{of} {'Nemotron 3 Nano' if experts else 'Nemotron-H-8B'}"
    if experts:
        names = {8: "Mixtral 8x7B", 32: "gpt-oss-20b", 128: "Qwen3-30B-A3B"}
        return "OLMoE-1B-7B" if experts == 64 else f"{of} {names[experts]}"
    return f"{of} 8B" if c["model.num_layers"] == 8 else ""


def of_layers(config: dict[str, Any], field: str) -> Any:
    """Return a field of a card's layers, which have addresses; on older cards, it is of `model`."""
    fields = {key: value for key, value in config.items() if key.startswith("model.")}
    return next((value for key, value in fields.items() if key.endswith(f".{field}")), None)


def recurrences(config: dict[str, Any]) -> set[str]:
    """Return the classes of a card's recurrent mixers. Older cards have a letter for each layer."""
    classes = {value for key, value in config.items() if key.endswith(".mixer.class")}
    letters = config.get("model.layer_pattern") or ""
    return {name for letter, name in RECURRENT.items() if letter in letters or name in classes}


def row(name: str, card: dict[str, Any]) -> str:
    """Return the row of a card."""
    rate, step = card["tokens_per_second_per_device"], card["step_seconds"]
    cells = [
        model_of(card),
        mesh_of(card),
        how(card),
        f"[{rate:,.0f}]({name}.json)",
        f"{card['mfu_causal']:.1%}",
        f"{card['peak_memory_gib']:.1f}",
        f"{1e3 * step['median']:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the table of the cards that are not compared with torchtitan, as Markdown."""
    rows, before = [], ""
    for name, card in cards():
        if name in BESIDE:
            continue
        model, cells = model_of(card), row(name, card)
        # A model is named in the first of its rows.
        rows.append(cells.replace(f"| {model} |", "| |", 1) if model == before else cells)
        before = model
    return HEAD + "".join(f"{cells}\n" for cells in rows)


# ------------------------------------------------------------------------- jaxpar and torchtitan


def pairs() -> list[tuple[str, dict[str, Any], str, dict[str, Any]]]:
    """Return names and cards of jaxpar and torchtitan, in the order of BESIDE."""
    read = lambda name: json.loads((CARDS / f"{name}.json").read_text("utf-8"))  # noqa: E731
    return [(ours, read(ours), theirs, read(theirs)) for ours, theirs in BESIDE.items()]


def is_float8(card: dict[str, Any]) -> bool:
    """Return whether a card's matmuls are in float8."""
    return card["config"].get("compute.matmul_dtype") == "float8"


def recomputed(theirs: dict[str, Any]) -> str:
    """Return torchtitan's mode of activation checkpointing."""
    words = theirs["command"]
    mode = words[words.index("--activation_checkpoint.mode") + 1]
    option = "--activation_checkpoint.selective_ac_option"
    # By default, selective means option 2.
    return "every second layer" if mode == "selective" and option not in words else mode


def versus(few: bool = False) -> str:
    """Return the comparison with torchtitan as Markdown. few: the shorter table of the README."""
    folder = "docs/benchmarks/" if few else ""
    head = ["model, sequence length", "GPUs, mesh", *([] if few else ["options of jaxpar"])]
    head += ["jaxpar, tokens/s/GPU", "torchtitan", "ratio"]
    head += ["MFU causal, full", "GiB: jaxpar, torchtitan"]
    lines = [head, ["---"] * len(head)]
    for name, card, other, theirs in pairs():
        if few and name not in FEW:
            continue
        rate, peer = (each["tokens_per_second_per_device"] for each in (card, theirs))
        float8 = ", float8" if few and is_float8(card) else ""
        recomputes = "" if few or recomputed(theirs) == "none" else f", {recomputed(theirs)}"
        cells = [model_of(card), mesh_of(card, named=few) + float8, *([] if few else [how(card)])]
        cells += [f"[{rate:,.0f}]({folder}{name}.json)"]
        cells += [f"[{peer:,.0f}]({folder}{other}.json){recomputes}"]
        cells += [
            f"{rate / peer:.2f}",
            f"{card['mfu_causal']:.1%}, {card['mfu_full_attention']:.1%}",
        ]
        lines.append([*cells, f"{card['peak_memory_gib']:.1f}, {theirs['peak_memory_gib']:.1f}"])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def ratio(card: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return jaxpar's rate over torchtitan's."""
    return card["tokens_per_second_per_device"] / theirs["tokens_per_second_per_device"]


def release() -> str:
    """Return the release of torchtitan in the comparisons: one, or several."""
    return " and ".join(sorted({theirs["torchtitan"] for _, _, _, theirs in pairs()}))


def headline() -> str:
    """Return the README's sentence on all comparisons."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for _, card, _, theirs in pairs():
        found[bool(of_layers(card["config"], "num_experts"))].append(ratio(card, theirs))
    spans = [f"{min(some):.2f} to {max(some):.2f}" for some in found.values()]
    slower = sum(one <= 1 for some in found.values() for one in some)
    how = "all" if not slower else f"{len(pairs()) - slower} of"
    return (
        f"- **Fast on Hopper.** jaxpar is faster than torchtitan {release()} in {how} "
        f"{len(pairs())} comparisons made on H100s and H200s: dense models by a factor of "
        f"{spans[0]}, mixtures of experts by {spans[1]}.\n"
    )


def picture(folder: str) -> str:
    """Return the chart of all comparisons, on a page from which it is in `folder`."""
    what = f"Tokens per second and GPU of jaxpar, relative to torchtitan, in {len(pairs())}"
    return f"![{what} comparisons]({folder}images/torchtitan.svg)\n"


def attention() -> str:
    """Return the comparison of jaxpar's Hopper kernels with cuDNN as Markdown."""
    found = json.loads((CARDS / "attention-h200.json").read_text("utf-8"))["rows"]
    ours = [row for row in found if row["backend"] == "pallas_hopper"]
    shapes = {tuple(row[k] for k in ("kind", *"BTSHGD")): {} for row in ours}
    for row in ours:
        shapes[tuple(row[k] for k in ("kind", *"BTSHGD"))][row["direction"]] = row
    lines = ["| mask | B, T, H, G, D | forward | backward | both |", "|---|---|---|---|---|"]
    for (kind, b, t, s, *rest), rows in shapes.items():
        if t != s:
            continue  # cuDNN has no such mask
        sizes = ", ".join(map(str, (b, t, *rest)))
        cells = [
            f"{rows[way]['tflops']:.0f}, {rows[way]['times_cudnn']:.2f} ×"
            for way in ("forward", "backward", "both")
        ]
        lines.append(f"| {kind} | {sizes} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------- pages

#: Of each page, what stands between `<!-- NAME -->` and `<!-- /NAME -->`.
BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/benchmarks/README.md": {
        "picture": lambda: picture("../"),
        "torchtitan": versus,
        "attention": attention,
    },
    "docs/index.md": {"picture": lambda: picture("")},
    "README.md": {
        "headline": headline,
        "picture": lambda: picture("docs/"),
        "benchmarks": lambda: versus(few=True),
    },
}


def filled(page: str) -> str:
    """Return a page with its tables and sentences updated from the cards."""
    return with_blocks(page, (ROOT / page).read_text("utf-8"), BLOCKS[page])


def with_blocks(page: str, text: str, blocks: dict[str, Callable[[], str]]) -> str:
    """Return a page's text with its blocks made again."""
    for name, make in blocks.items():
        made = f"<!-- {name} -->\n{make()}<!-- /{name} -->"
        text, count = re.subn(
            rf"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _, made=made: made, text, flags=re.S
        )
        assert count == 1, f"{page} has no place for {name}"
    return text


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    if argv not in ([], ["--write"], ["--check"]):
        sys.exit(__doc__)
    differ = [page for page in BLOCKS if filled(page) != (ROOT / page).read_text("utf-8")]
    if argv == ["--write"]:
        for page in differ:
            (ROOT / page).write_text(filled(page), "utf-8")
    elif not argv:
        print("\n".join(make() for blocks in BLOCKS.values() for make in blocks.values()), table())
    for page in differ if argv else []:
        print(f"{page}: {'written' if argv == ['--write'] else 'differs from the cards'}")
    return int(bool(differ) and argv == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
