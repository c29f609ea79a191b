"""The site builds without a warning, finds its pages by search, and asks for nothing elsewhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from jaxpar.config import reference
from jaxpar.execution.xla_flag_table import FLAGS
from tests.meta.test_repository import links_of, text_of_pages
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]

#: What a browser would fetch: links that are only followed on a click are not among it.
FETCHED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(https?:[^\"]+)\"|@import")
SHEET = re.compile(
    r"<link\b(?=[^>]*rel=\"(?:stylesheet|preconnect)\")[^>]*href=\"(https?:[^\"]+)\""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_there_and_found_by_search(site):
    pages = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in docs_pages()}
    pages |= {Path(f"{name}.html") for name in ("contributing", "changelog", *reference.PAGES)}
    pages = {p.with_name("index.html") if p.stem == "README" else p for p in pages}
    assert not {str(page) for page in pages if not (site / page).is_file()}
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    found = {entry["location"].partition("#")[0] for entry in index}
    assert {str(page) for page in pages} <= found
    assert any("zigzag" in entry["text"].lower() for entry in index)
    assert any("train.num_steps" in entry["text"] for entry in index)


def test_tables_that_only_the_site_has_are_complete(site):
    flags = (site / "profiling.html").read_text("utf-8").replace("<wbr>", "")
    assert [f.name for f in FLAGS if f.name.removeprefix("xla_gpu_") not in flags] == []
    cards = (site / "benchmarks" / "index.html").read_text("utf-8")
    texts = {f.name: f.read_text("utf-8") for f in (ROOT / "docs/benchmarks").glob("*.json")}
    names = [name for name, text in texts.items() if '"parameters"' in text]
    assert len(names) > 50 and [name for name in names if f'href="{name}"' not in cards] == []


def test_notebooks_are_pages_with_their_pictures(site):
    names = [path.stem for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")]
    texts = [(site / "notebooks" / f"{name}.html").read_text("utf-8") for name in names]
    assert len(texts) > 8 and all("data:image/png" in text for text in texts)
    assert 'href="notebooks/07_ten_lines.html"' in (site / "python_api.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("multi-node", "clusters"),
        ("gradient clipping", "numerics"),
        ("early stopping", "monitoring"),
        ("OOM", "memory"),
        ("NCCL timeout", "troubleshooting"),
        ("custom loss", "extend/losses"),
        ("custom dataset", "data"),
        ("vLLM", "convert"),
        ("Shakespeare", "data"),
        ("activation checkpointing", "parallelism"),
        ("mixed precision", "precision"),
    ],
)
def test_the_names_of_other_systems_are_in_the_index(site, words, page):
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    texts = {e["location"]: f"{e['title']} {e['text']}".lower() for e in index}
    named = {at.partition(".html")[0] for at, text in texts.items() if words.lower() in text}
    assert page in named


def search(shown, words: str) -> list[str]:
    """Type words into the search of a page. Returns: the links that are found."""
    box = shown.page.locator("input.md-search__input")
    box.fill(words)
    box.press("End")  # it searches as a key is released
    answer = shown.page.locator(".md-search-result__meta")
    expect(answer).to_have_text(re.compile(r"\bmatching document"))
    links = shown.page.locator(".md-search-result__link")
    return links.evaluate_all("found => found.map(a => a.href)")


#: Words to search for: one of several pages, and one of none.
WORDS = ("zigzag", "zzyzzyva")


@pytest.mark.slow  # quicker: every page is found by search, above
@pytest.mark.waits
def test_search_works_from_disk(site, show):
    opened = [show(site / "index.html", 1280) for _ in range(2)]
    links, none = (search(shown, words) for shown, words in zip(opened, WORDS, strict=True))
    assert none == [] and opened[0].complaints == []
    assert {urlsplit(address).scheme for address in opened[0].requests} <= {"file", "data"}
    pages = {Path(urlsplit(link).path).relative_to(site) for link in links}
    assert Path("parallelism.html") in pages
    assert all("zigzag" in (site / page).read_text("utf-8").lower() for page in pages)


def docs_pages() -> list[Path]:
    """Pages under docs/, all of which are in the navigation (mkdocs.yml warns of others)."""
    return sorted((ROOT / "docs").rglob("*.md"))


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        assert not FETCHED.findall(text) + SHEET.findall(text), page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:", sheet.read_text("utf-8")), sheet.name


def test_links_to_source_files_lose_their_link_and_keep_their_words(site):
    text = (site / "contributing.html").read_text("utf-8").replace("<wbr>", "")
    assert "<code>jaxpar/sharding/axes.py</code>" in text
    assert 'href="jaxpar/sharding/axes.py"' not in text
    assert 'href="changelog.html"' in text
    text = (site / "code.html").read_text("utf-8").replace("<wbr>", "")
    assert "<code>kernels/</code>" in text
    assert 'href="../jaxpar' not in text


#: What is wider than its place: code and tables that scroll to the side, pictures that stick out.
WIDER = """() => [...document.querySelectorAll(
    ".md-content pre > code, .md-typeset__scrollwrap, .md-content img")]
  .filter(e => e.scrollWidth > e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth)
  .map(e => e.innerText || e.src)"""


@pytest.mark.waits
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("pages", ["configuration.html", slow("**/*.html")])
def test_nothing_is_wider_than_its_column(site, show, pages, width):
    for page in site.glob(pages):
        assert show(page, width).page.evaluate(WIDER) == [], page.name


def badly_formed(link: str) -> bool:
    """Whether a link to elsewhere cannot be one: another scheme, no host, a space, a stray mark."""
    parts = urlsplit(link)
    host = parts.hostname or ""
    named = re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", host)
    stray = re.search(r"[\s<>\"{}|\\^`]|\.$", link)
    bare_forge = host == "github.com" and len(parts.path) < 2
    return parts.scheme != "https" or not named or bool(stray) or bare_forge


def test_links_to_elsewhere_are_well_formed():
    links = {
        (page, link)
        for page, text in text_of_pages(history=True).items()
        for link in links_of(text)
        if re.match(r"[a-z][a-z0-9+.-]*:|//", link)
    }
    assert len(links) > 3
    assert not [(page, link) for page, link in links if badly_formed(link)]
    for bad in ("http://a.org", "https://a b.org", "https://nowhere", "https://github.com/"):
        assert badly_formed(bad)
