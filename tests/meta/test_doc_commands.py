"""Every shell block of the pages is read, run, or marked as needing what a test has not.

A block is one of three: its lines are programs of this repository, whose options are read as they
read them (`test_docs.py`, and below); `<!-- runs: quick -->` or `<!-- runs: slow -->` above it, and
it is run here, with the others of its page, in an empty folder; or `<!-- needs: ... -->`.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxpar.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]

#: The experiments and CHANGELOG.md are history.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "jaxpar" / "config" / "configuration.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != "experiments.md"),
]

#: What a block may need that no test has.
NEEDS = {"GPU", "cluster", "network", "wheels"}

BLOCK = re.compile(r"(?:^<!-- (needs|runs): ([^>]*?) -->\n+)?^```(\w+)\n(.*?)^```", re.M | re.S)
HEREDOC = re.compile(r"^cat > \S+ <<'(\w+)'\n.*?^\1\n", re.M | re.S)


class Block(NamedTuple):
    """A shell block: its mark, "needs" or "runs" or none, what the mark says, and its lines."""

    mark: str
    says: str
    code: str


def shell_blocks(text: str) -> list[Block]:
    """The shell blocks of a page; the shell is called sh everywhere."""
    found = [Block(m[1] or "", m[2] or "", m[4]) for m in BLOCK.finditer(text) if m[3] == "sh"]
    others = {m[3] for m in BLOCK.finditer(text)} & {"bash", "shell", "console", "zsh"}
    assert not others, f"call it sh: {others}"
    return found


def unread(block: Block) -> list[str]:
    """Lines of a block that nothing has read: no program of the repository, no target of make."""
    lines = HEREDOC.sub("", block.code).replace("\\\n", " ").splitlines()
    return [
        line for line in lines if (words := shlex.split(line, comments=True)) and not read(words)
    ]


def read(words: list[str]) -> bool:
    """Whether a command is checked by its own test, or is a script here with such options."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    match words:
        case ["python", "-m", "tests.e2e.soak", *trials]:
            return set(trials) <= {"matrix", "kills"}
        case ["python", "-m", program, *_]:
            return program.startswith("jaxpar.")  # its options: test_docs.py
        case ["jaxpar", command, *_]:
            return command in COMMANDS  # its options: test_docs.py
        case ["python", script, *options] if script.startswith("scripts/"):
            path = ROOT / script
            source = path.read_text("utf-8") if path.is_file() else ""
            names = [word.partition("=")[0] for word in options if word.startswith("--")]
            return bool(source) and all(name in source for name in names)
        case ["echo", _, "|", *rest]:
            return read(rest)
        case ["sh", script, *_] if script.startswith("scripts/recipes/"):
            return (ROOT / script).is_file()  # its options: tests/e2e/test_recipes.py
        case ["make", *_] | ["mkdir", "-p", _]:
            return True  # targets: test_repository.py
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_read_run_or_marked(page):
    for block in shell_blocks(page.read_text("utf-8")):
        shown = f"{page.name}:\n{block.code}"
        match block.mark:
            case "needs":
                assert set(block.says.split(", ")) <= NEEDS, f"needs one of {NEEDS}: {shown}"
            case "runs":
                assert block.says in ("quick", "slow"), shown
            case _:
                assert not unread(block), f"mark it, or let a test read {unread(block)}; {shown}"
        syntax = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)
        assert syntax.returncode == 0, syntax.stderr + shown


def test_a_line_that_nothing_reads_is_seen():
    (block,) = shell_blocks("```sh\nmake test\npip install x\npython scripts/none.py\n```\n")
    assert unread(block) == ["pip install x", "python scripts/none.py"]
    (block,) = shell_blocks("<!-- needs: GPU -->\n```sh\nnvidia-smi\n```\n")
    assert block == ("needs", "GPU", "nvidia-smi\n")
    assert not read(["python", "scripts/docs/code_map.py", "--wrote"])
    assert read(["jaxpar", "plan", "llama3_8b"]) and not read(["jaxpar", "plam", "llama3_8b"])


def script_of(page: Path, how: str) -> str:
    """The blocks of a page that are run so, one after another; slow ones after the quick ones
    before them. Empty where there are none."""
    blocks = [b for b in shell_blocks(page.read_text("utf-8")) if b.mark == "runs"]
    if how not in {b.says for b in blocks}:
        return ""
    return "".join(b.code for b in blocks if b.says in (how, "quick"))


def run_page(page: Path, how: str, folder: Path) -> str:
    """Run a page's blocks in an empty folder, as a reader would. Returns: what they print."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    command = folder / "bin" / "jaxpar"
    command.write_text('#!/bin/sh\nexec python -m jaxpar "$@"\n')
    command.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"PATH": f"{folder / 'bin'}:{env['PATH']}", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["bash", "-euxc", script_of(page, how)],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


def run_so(how: str) -> list[Path]:
    """Pages with blocks that are run so."""
    return [page for page in PAGES if script_of(page, how)]


@pytest.mark.parametrize("page", run_so("quick"), ids=lambda page: page.name)
def test_quick_blocks_run(page, tmp_path):
    run_page(page, "quick", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", run_so("slow"), ids=lambda page: page.name)
def test_slow_blocks_run(page, tmp_path):
    run_page(page, "slow", tmp_path)
