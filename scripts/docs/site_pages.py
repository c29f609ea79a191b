"""Adds pages to the site, and other names of what pages are about: an MkDocs hook.

CONTRIBUTING.md, CHANGELOG.md and the notebooks become pages, and links to and from them are
adjusted. Links to files that are not pages, such as source files, become plain text.
"""

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs runs this file by its path

from also_called import ALSO_CALLED
from notebook_pages import page_of

ROOT = Path(__file__).resolve().parents[2]

#: Files at the root of the repository, and the pages that they become.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)+)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def from_root(text: str) -> str:
    """Adjust the links of a page from the repository's root."""

    def turned(found: re.Match) -> str:
        words, path, anchor = found[1], found[2], found[3] or ""
        page = PAGES.get(path, path.removeprefix("docs/"))
        is_page = path in PAGES or (path.startswith("docs/") and (ROOT / path).is_file())
        return f"[{words}]({page}{anchor})" if is_page else words

    return LINK.sub(turned, text)


def to_root(text: str, page: str) -> str:
    """Adjust the links of a page of docs/ to files outside of it."""

    def turned(found: re.Match) -> str:
        words, path, anchor = found[1], found[2], found[3] or ""
        target = ROOT.joinpath("docs", page).parent.joinpath(path).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        return f"[{words}]({PAGES[target.name]}{anchor})" if target.name in PAGES else words

    return LINK.sub(turned, text)


def notebooks() -> list[Path]:
    """Return the notebooks in order."""
    return sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the notebooks to the navigation; called by MkDocs after reading mkdocs.yml."""
    pages: list[str | dict[str, str]] = [f"notebooks/{one.stem}.md" for one in notebooks()]
    assert config.nav is not None
    for section in config.nav:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and entry.get("Notebooks") == "notebooks/README.md":
                entry["Notebooks"] = ["notebooks/README.md", *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; called by MkDocs after listing docs/."""
    for name, page in PAGES.items():
        text = from_root((ROOT / name).read_text("utf-8"))
        files.append(File.generated(config, page, content=text))
    for one in notebooks():
        files.append(File.generated(config, f"notebooks/{one.stem}.md", content=page_of(one)))
    return files


def with_names(text: str, page: str) -> str:
    """Add other names of what its headings are about (also_called.py).

    Raises:   ValueError if the page lacks a heading.
    """
    for heading, names in ALSO_CALLED.get(page, {}).items():
        line = re.compile(rf"^#+ {re.escape(heading)}$", re.MULTILINE)
        text, count = line.subn(rf"\g<0>\n\n*Also called: {names}.*", text)
        if count != 1:
            raise ValueError(f"also_called.py: {page} has {count} headings {heading!r}")
    return text


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adjust a page's links and add other names; called by MkDocs after reading it."""
    text = re.sub(r"(\]\([^)\s]+)\.ipynb\)", r"\1.md)", markdown)
    return with_names(to_root(text, page.file.src_uri), page.file.src_uri)
