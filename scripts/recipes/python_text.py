"""Makes text, chats and pairs of what every Python has, so that recipes need no network.

    python scripts/recipes/python_text.py text --output FILE.txt      Python's language reference
    python scripts/recipes/python_text.py chats --output FILE.jsonl   questions about functions
    python scripts/recipes/python_text.py pairs --output FILE.jsonl   the same, with two answers

The text is that of pydoc's topics. A chat asks what a function or class of the standard library
does, by its name and arguments, and answers with the first sentence of its docstring. The rejected
answer of a pair has the same words in alphabetical order.
"""

import argparse
import ast
import hashlib
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

#: Folders of the standard library that are no part of its interface.
LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages"}

#: Characters of an answer.
SHORTEST, LONGEST = 20, 160

#: Questions of the pairs.
PAIRS = 1500


def text() -> str:
    """Return pydoc's topics, chapters of the language reference, one after another.

    Topics quote one another: of equal paragraphs the first is kept, so that no held-out text was
    in training.
    """
    from pydoc_data.topics import topics

    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


def answers() -> dict[str, str]:
    """Return the first sentence of a docstring by the question about it, in the order of a hash."""
    found: dict[str, str] = {}
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if LEFT_OUT.isdisjoint(parts):
            module = ".".join(part for part in parts if part != "__init__")
            for name, docstring in documented(file.read_text("utf-8", errors="ignore")):
                answer = first_sentence(docstring)
                if SHORTEST <= len(answer) <= LONGEST:
                    found.setdefault(f"What does {module}.{name} do?", answer)
    return dict(sorted(found.items(), key=lambda one: hashlib.sha256(one[0].encode()).digest()))


def documented(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of the public functions, classes and methods of a module."""
    try:
        with warnings.catch_warnings(action="ignore"):
            module = ast.parse(source)
    except SyntaxError:  # an example of what an older Python reads
        return
    yield from _documented(module, "")


def _documented(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    for one in node.body:
        if not isinstance(one, ast.FunctionDef | ast.ClassDef) or one.name.startswith("_"):
            continue
        if docstring := ast.get_docstring(one):
            arguments = f"({_arguments(one)})" if isinstance(one, ast.FunctionDef) else ""
            yield f"{prefix}{one.name}{arguments}", docstring
        if isinstance(one, ast.ClassDef):
            yield from _documented(one, f"{prefix}{one.name}.")


def _arguments(function: ast.FunctionDef) -> str:
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    return ", ".join(name for name in names if name != "self")


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring on one line, with a full stop."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph)[0].rstrip(".") + "."


def chats() -> str:
    """Return lines of JSON with a list `messages` each."""
    return "".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
        + "\n"
        for question, answer in answers().items()
    )


def pairs() -> str:
    """Return lines of JSON with `prompt`, `chosen` and `rejected` each."""
    rows = (
        (question, answer, " ".join(sorted(answer.split())))
        for question, answer in islice(answers().items(), PAIRS)
    )
    return "".join(
        json.dumps({"prompt": question, "chosen": chosen, "rejected": rejected}) + "\n"
        for question, chosen, rejected in rows
        if chosen != rejected
    )


KINDS = {"text": text, "chats": chats, "pairs": pairs}


def main() -> None:
    """Read the command line and write a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.write_text(KINDS[options.kind](), "utf-8")


if __name__ == "__main__":
    main()
