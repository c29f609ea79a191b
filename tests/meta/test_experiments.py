"""The experiments: references lead to a section, and each page opens with a table of results."""

import re
from pathlib import Path

import pytest

from tests.meta.test_repository import anchors_of, tracked_files

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "experiments"
PAGES = sorted(p for p in FOLDER.glob("*.md") if p.name != "README.md")

REFERENCE = re.compile(r"docs/experiments/([\w./-]+?\.md)(?:#([\w-]+))?(?![\w/])")
HEAD = "| Outcome | What | Figure | Conditions |\n|---|---|---|---|\n"
ROW = re.compile(r"\| (Kept|Not kept|Measured)( \| [^|]+){3} \|")


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


def table_of(text: str) -> list[str]:
    """The rows of the table that a page opens with."""
    title, _, rest = text.partition("\n\n")
    assert re.fullmatch(r"# .+", title), "a page opens with its title"
    assert HEAD in rest, "a table follows the title"
    return rest.partition(HEAD)[2].partition("\n\n")[0].splitlines()


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


def test_nothing_refers_to_the_former_log():
    former = re.compile(r"(?<![A-Z])LOG" + r"\.md")
    assert not [str(f.relative_to(ROOT)) for f, text in texts().items() if former.search(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_opens_with_its_table(page):
    rows = table_of(page.read_text("utf-8"))
    assert rows and not [row for row in rows if not ROW.fullmatch(row)]


def test_the_overview_names_every_page():
    text = (FOLDER / "README.md").read_text("utf-8")
    assert re.findall(r"^\| \[[^\]]+\]\((\w+\.md)\)", text, re.MULTILINE)
    assert set(re.findall(r"\]\((\w+\.md)\)", text)) == {page.name for page in PAGES}
