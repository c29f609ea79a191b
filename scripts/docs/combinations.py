"""Makes docs/combinations.md: python scripts/docs/combinations.py [--write]

Its table is `jaxpar/config/incompatible.py`. Without options, prints the page.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.config.incompatible import TABLE  # noqa: E402

PAGE = ROOT / "docs" / "combinations.md"
HEAD = """# What combines with what

Settings and parts of models can be combined, except these pairs, each refused with its reason and a
fix. Other rules are of one field: sizes that a mesh must divide, and options that need another one.

|setting|is not supported with|
|---|---|
"""


def page() -> str:
    """Return the page: a row for each setting, with all that it excludes, by reason."""
    rows: dict[str, dict[str, list[str]]] = {}
    for one, other, why in TABLE:
        rows.setdefault(other.label, {}).setdefault(why, []).append(one.label)
    cells = {
        label: "; ".join(f"{', '.join(excluded)}: {why}" for why, excluded in reasons.items())
        for label, reasons in rows.items()
    }
    return HEAD + "".join(f"|{label}|{cell}|\n" for label, cell in cells.items())


def main() -> None:
    """Print the page or write it."""
    if sys.argv[1:] != ["--write"]:
        print(page(), end="")
        return
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
