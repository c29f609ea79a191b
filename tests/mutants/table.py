"""The table of injected faults and what found each, in docs/experiments.md."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.every import every_fault, read_results
from tests.mutants.fault import ROOT, Fault
from tests.mutants.running import CERTIFY, Result

PAGE = ROOT / "docs" / "experiments.md"

#: Where the reports of `Fault.source` are, and of those without a number the page.
REPOSITORIES = {
    "Automodel": "NVIDIA-NeMo/Automodel",
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "pytorch": "pytorch/pytorch",
    "torchtitan": "pytorch/torchtitan",
    "torchtune": "meta-pytorch/torchtune",
    "transformers": "huggingface/transformers",
}

#: What found a fault, in words, in the order of the table.
WORDS = {
    "": "nothing",
    "not run": "",
    "test": "a test",
    "certify": CERTIFY[1].removeprefix("jaxpar."),
    "crashed": "a crash",
    "traced": "tracing",
}

BEGIN, END = "<!-- faults -->\n", "<!-- /faults -->"
HEAD = "\n|fault|report|found by|\n|---|---|---|\n"


def write(page: Path = PAGE) -> None:
    """Write the table into its page."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    made = text(every_fault(), read_results())
    page.write_text(before + BEGIN + made + END + rest.partition(END)[2], "utf-8")


def text(faults: Iterable[Fault], results: dict[str, Result]) -> str:
    """Return the counts, and a row for each fault of a public report or that nothing found."""
    pairs = [(f, results.get(f.name, Result(f.name, "not run"))) for f in faults]
    order = list(WORDS)
    pairs.sort(key=lambda pair: (order.index(pair[1].found_by), pair[0].name))
    public = [result for fault, result in pairs if fault.source != "own"]
    score = f"- all: {_score([result for _, result in pairs])}\n"
    score += f"- of public reports: {_score(public)}\n"
    shown = [
        (fault, result)
        for fault, result in pairs
        if not result.found_by or (fault.source != "own" and result.found_by != "not run")
    ]
    return score + HEAD + "".join(_row(*pair) for pair in shown)


def _score(results: list[Result]) -> str:
    """Say how many of some faults were found by what."""
    by = Counter(result.found_by for result in results)
    ran = len(results) - by["not run"]
    found = ran - by[""]
    ways = ", ".join(f"{n} by {WORDS[how]}" for how, n in by.items() if how not in ("", "not run"))
    return f"**{found} of {ran}** that were run were found: {ways}" + (
        f"; not run: {by['not run']}" if by["not run"] else ""
    )


def _row(fault: Fault, result: Result) -> str:
    waits = result.found_by == "" and fault.tests and not result.tested
    found = "untested" if waits else WORDS[result.found_by]
    found = result.check if result.found_by == "certify" and result.check else found
    return f"|{fault.name}|{_link(fault.source)}|{found}|\n"


def _link(source: str) -> str:
    if source == "own":
        return ""
    project, _, number = source.rpartition(" ")
    return f"[{source}](https://github.com/{REPOSITORIES[project]}/issues/{number})"
