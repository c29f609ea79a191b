"""Adds pages to the site, and other names of what pages are about: an MkDocs hook.

CONTRIBUTING.md, CHANGELOG.md, the tables of the config and the notebooks become pages, and links to
them are adjusted. Links to other files outside docs/, such as source files, become plain text.
"""

import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]  # MkDocs runs this file by its path

import benchmark_table  # noqa: E402
import flag_table  # noqa: E402
from also_called import ALSO_CALLED  # noqa: E402
from notebook_pages import page_of  # noqa: E402

from jaxpar.config import reference  # noqa: E402

#: Files outside docs/ that are pages of the site, and what they have there.
PAGES: dict[str, tuple[str, Callable[[], str]]] = {
    "CONTRIBUTING.md": ("contributing.md", (ROOT / "CONTRIBUTING.md").read_text),
    "CHANGELOG.md": ("changelog.md", (ROOT / "CHANGELOG.md").read_text),
    "jaxpar/config/configuration.md": ("configuration.md", reference.configuration),
    "jaxpar/config/incompatible.py": ("combinations.md", reference.combinations),
}
SOURCES = {page: file for file, (page, _) in PAGES.items()}

#: Tables of pages that only the site has, in place of a mark.
TABLES = {
    "benchmarks/README.md": ("<!-- cards -->\n", benchmark_table.table),
    "profiling.md": ("<!-- flag table -->\n", flag_table.table),
}

LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)+)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def with_links(text: str, page: str) -> str:
    """Turn links to files of the repository into links to pages of the site, or plain text."""
    folder = (ROOT / SOURCES.get(page, f"docs/{page}")).parent

    def turned(found: re.Match) -> str:
        words, path, anchor = found[1], found[2], found[3] or ""
        file = Path(os.path.normpath(folder / path))
        name = file.relative_to(ROOT).as_posix()
        if name in PAGES:
            target = PAGES[name][0]
        elif name.startswith("docs/"):
            target = re.sub(r"\.ipynb$", ".md", name.removeprefix("docs/"))
        else:
            return words
        return f"[{words}]({os.path.relpath(target, Path(page).parent)}{anchor})"

    return LINK.sub(turned, text)


def notebooks() -> list[Path]:
    """Return the notebooks in order."""
    return sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the notebooks to the navigation; called by MkDocs after reading mkdocs.yml."""
    assert config.nav is not None
    (section,) = (part["Reference"] for part in config.nav if "Reference" in part)
    section.append({"Notebooks": [f"notebooks/{one.stem}.md" for one in notebooks()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; called by MkDocs after listing docs/."""
    for page, text in PAGES.values():
        files.append(File.generated(config, page, content=text()))
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


def with_table(text: str, page: str) -> str:
    """Put a table in place of a page's mark."""
    mark, table = TABLES.get(page, ("", str))
    return text.replace(mark, table()) if mark else text


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add tables and other names, and adjust links; called by MkDocs after reading a page."""
    name = page.file.src_uri
    return with_names(with_links(with_table(markdown, name), name), name)


def with_columns(table: re.Match) -> str:
    """Let code in a table break after a mark; say how wide it is, and of which column a cell is.

    site.css makes wide tables smaller, and stacks the cells of a row on a narrow screen.
    """
    marks = lambda code: re.sub(r"([._/=,:])(?=[^\s<])", r"\1<wbr>", code[0])  # noqa: E731
    text = re.sub(r"(?<=<code>)[^<]+(?=</code>)", marks, table[0])
    heads = [re.sub(r"<[^>]+>", "", head) for head in re.findall(r"<th\b[^>]*>(.*?)</th>", text)]
    size = "narrow" if len(heads) < 3 else "medium" if len(heads) < 7 else "wide"
    columns = itertools.cycle(head.replace('"', "&quot;") for head in heads)
    text = re.sub("<td", lambda cell: f'{cell[0]} data-column="{next(columns)}"', text)
    return text.replace("<table", f'<table data-size="{size}"', 1)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Prepare tables for all widths; called by MkDocs after indexing a page."""
    return re.sub(r"<table>\n<thead>.*?</table>", with_columns, output, flags=re.DOTALL)
