"""References to the pages of experiments lead to a section."""

import re
from pathlib import Path

from tests.meta.test_repository import anchors_of, tracked_files

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "experiments"


REFERENCE = re.compile(r"docs/experiments/([\w./-]+?\.md)(?:#([\w-]+))?(?![\w/])")


def texts() -> dict[Path, str]:
    """Every tracked file of text."""
    found = {}
    for file in tracked_files():
        try:
            found[file] = file.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # binary
    return found


def broken_references(text: str) -> list[str]:
    """References of a text to a page or a heading that does not exist."""
    broken = []
    for found in REFERENCE.finditer(text):
        page, anchor = FOLDER / found[1], found[2]
        there = page.is_file()
        if not there or (anchor and anchor not in anchors_of(page.read_text("utf-8"))):
            broken.append(found[0])
    return broken


def test_references_lead_to_a_section():
    found = texts()
    broken = {str(f.relative_to(ROOT)): b for f, t in found.items() if (b := broken_references(t))}
    assert not broken
    assert sum(len(REFERENCE.findall(text)) for text in found.values()) > 20


def test_a_broken_reference_is_seen():
    page = "docs/experiments/" + "attention.md"
    good = f"({page}#persistent-ctas), {page}, `{page}#hopper-forward`."
    assert broken_references(good) == []
    assert len(broken_references(f"{page}#no-such, docs/experiments/" + "none.md")) == 2
