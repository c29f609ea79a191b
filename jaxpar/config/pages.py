"""Shows a page of the documentation in the terminal: jaxpar --help PAGE"""

import difflib
import sys

from jaxpar.config.config_file import place_of
from jaxpar.config.errors import ConfigError

#: The pages of a checkout, or of a wheel.
DOCS = place_of("docs")


def show(name: str, called: str) -> None:
    """Print a page, laid out if the output is a terminal.

    Args:
        name:    with or without `docs/` and `.md`.
        called:  the program, for errors.

    Raises:   ConfigError for an unknown page.
    """
    from jaxpar.config.reference import PAGES  # imports every rule: other help does not wait

    pages = sorted(DOCS.rglob("*.md"))
    written = {str(page.relative_to(DOCS).with_suffix("")): page for page in pages}
    known = sorted([*written, *PAGES])
    wanted = name.removeprefix("docs/").removesuffix(".md").replace("-", "_")
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=3)
        fix = f"use {called} --help {near[0]}" if near else f"use {called} --help index"
        raise ConfigError("PAGE", name, "is not a page of the documentation", fix)
    text = PAGES[wanted]() if wanted in PAGES else written[wanted].read_text("utf-8")
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))
