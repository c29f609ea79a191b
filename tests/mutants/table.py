"""The page with all faults and what found each."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.every import every_fault, read_results
from tests.mutants.fault import ROOT, Fault
from tests.mutants.running import CERTIFY, Result

PAGE = ROOT / "docs" / "experiments" / "injected_faults.md"

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

#: What found a fault, in words, in the order of the page.
WORDS = {
    "": "nothing",
    "not run": "",
    "test": "a test",
    "certify": CERTIFY[1].removeprefix("jaxpar."),
    "crashed": "a crash",
    "traced": "tracing",
}

HEAD = """\
# Injected faults

Written by `python -m tests.mutants`.

Each fault of [tests/mutants/faults](../../tests/mutants/faults) was put into a copy of the package,
one at a time: a factor, a sum, a set, an order or an index that is wrong, in one to six lines.
`{command}` then ran on CPU devices with the config and mesh that the fault names; where that
passed, the tests that it names did. Some stand for public reports of other systems; the others are
our own. *Untested*: the command passed, and the tests have not been run yet. *Found by* names a
check of the command. The last column has CPU seconds; results.json beside the faults has what was
off. Those that were not run, if any, are left out: `python -m tests.mutants --missing` runs them.

{score}

|fault|report|found by|s|
|---|---|---|---|
"""


def write(page: Path = PAGE) -> None:
    """Write the page."""
    page.write_text(text(every_fault(), read_results()), "utf-8")


def text(faults: Iterable[Fault], results: dict[str, Result]) -> str:
    """Return the page."""
    pairs = [(f, results.get(f.name, Result(f.name, "not run"))) for f in faults]
    order = list(WORDS)
    pairs.sort(key=lambda pair: (order.index(pair[1].found_by), pair[0].name))
    public = [result for fault, result in pairs if fault.source != "own"]
    score = [
        f"- all: {_score([result for _, result in pairs])}",
        f"- of public reports: {_score(public)}",
    ]
    head = HEAD.format(command=" ".join(["python", *CERTIFY]), score="\n".join(score))
    return head + "".join(_row(*pair) for pair in pairs if pair[1].found_by != "not run")


def _score(results: list[Result]) -> str:
    """Say how many of some faults were found by what."""
    by = Counter(result.found_by for result in results)
    ran = len(results) - by["not run"]
    found = ran - by[""]
    ways = ", ".join(f"{n} by {WORDS[how]}" for how, n in by.items() if how not in ("", "not run"))
    return f"**{found} of {ran}** that were run were found: {ways}" + (
        f"; {by['not run']} were not run" if by["not run"] else ""
    )


def _row(fault: Fault, result: Result) -> str:
    seconds = f"{result.seconds:.0f}" if result.seconds else ""
    waits = result.found_by == "" and fault.tests and not result.tested
    found = "untested" if waits else WORDS[result.found_by]
    found = result.check if result.found_by == "certify" and result.check else found
    cells = fault.name, _link(fault.source), found, seconds
    return f"|{'|'.join(cells)}|\n"


def _link(source: str) -> str:
    if source == "own":
        return ""
    project, _, number = source.rpartition(" ")
    return f"[{source}](https://github.com/{REPOSITORIES[project]}/issues/{number})"
