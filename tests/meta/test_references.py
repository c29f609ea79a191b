"""References of code to pages, such as docs/data.md#mixtures, lead to a page and its section."""

import re

from tests.meta.test_repository import ROOT, anchors_of, tracked_files

REFERENCE = re.compile(r"(?<![\w/.])docs/([\w/]+\.md)(?:#([\w-]+))?(?![\w/])")


def broken_references(text: str) -> list[str]:
    """References of a text to a page or a heading that does not exist."""
    broken = []
    for found in REFERENCE.finditer(text):
        page, anchor = ROOT / "docs" / found[1], found[2]
        there = page.is_file()
        if not there or (anchor and anchor not in anchors_of(page.read_text("utf-8"))):
            broken.append(found[0])
    return broken


def test_references_lead_to_a_section():
    kinds = {".py", ".json", ".toml", ".sh", ".yaml", ".yml"}
    texts = {f: f.read_text("utf-8") for f in tracked_files() if f.suffix in kinds}
    broken = {str(f.relative_to(ROOT)): b for f, t in texts.items() if (b := broken_references(t))}
    assert not broken
    assert sum(len(REFERENCE.findall(text)) for text in texts.values()) > 80


def test_a_broken_reference_is_seen():
    page = "docs/" + "data.md"
    good = f"({page}#mixtures), {page}, `{page}#mixtures`."
    assert broken_references(good) == []
    assert len(broken_references(f"{page}#no-such, docs/" + "none.md")) == 2
