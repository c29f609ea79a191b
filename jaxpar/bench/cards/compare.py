"""Compare cards side by side: python -m jaxpar.bench compare A.json B.json [C.json ...]

Prints each figure of cards of `bench train` with its ratio to the first card, and then the
conditions that differ.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.bench.cards import differences, figures
from jaxpar.config import ConfigError
from jaxpar.runtime.options import Parser

PROGRAM = "python -m jaxpar.bench compare"


def read_command(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:   ConfigError for fewer than two cards.
    """
    parser = Parser(PROGRAM, __doc__)
    parser.add_argument("cards", nargs="+", metavar="CARD", help="files written by --card")
    options = parser.parse_args(argv)
    if len(options.cards) < 2:
        fix = f"use {PROGRAM} A.json B.json"
        raise ConfigError("cards", options.cards[0], "must be at least two files", fix)
    return options


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    paths = read_command(argv).cards
    print(comparison(paths, [read_card(path) for path in paths]), flush=True)
    return 0


def comparison(paths: Sequence[str], cards: Sequence[dict[str, Any]]) -> str:
    """Format the cards' names, figures, warnings, and the conditions that differ."""
    names = [chr(ord("A") + n) if n < 26 else f"card{n + 1}" for n in range(len(cards))]
    titles = [f"{name}  {path}" for name, path in zip(names, paths, strict=True)]
    table, notes = figures.training_table(names, cards)
    parts = ["\n".join(titles), table, "\n".join([*differences.warnings(names, cards), *notes])]
    return "\n\n".join([*filter(None, parts), differences.table(names, cards)])


def read_card(path: str) -> dict[str, Any]:
    """Read a card.

    Cards of `scripts/measure/torchtitan_run.py` have fewer figures.

    Raises:   ConfigError if the file cannot be read or is not a card of bench train.
    """
    try:
        card = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise ConfigError("cards", path, rule, "use a file written by --card") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or too deep
        rule = f"is not JSON: {error}"
        raise ConfigError("cards", path, rule, "use a file written by --card") from error
    if not isinstance(card, dict):
        rule = f"is not a card but a JSON {type(card).__name__}"
        raise ConfigError("cards", path, rule, "use a file written by --card")
    if not isinstance(card.get("step_seconds"), dict) and "torchtitan" not in card:
        rule = "is not a card of bench train"
        raise ConfigError("cards", path, rule, "use a file that bench train wrote with --card")
    return card
