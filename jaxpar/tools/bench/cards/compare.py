"""Compare cards side by side: figures with their ratio to the first card, then conditions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.tools.bench.cards import differences, figures


def compare(paths: Sequence[str]) -> None:
    """Print the comparison of cards.

    Raises:   ConfigError for fewer than two cards, or a file that is none.
    """
    if len(paths) < 2:
        fix = "use python -m jaxpar.profile A.json B.json"
        raise ConfigError("RUN_OR_TRACE", paths[0], "must be at least two cards", fix)
    print(comparison(paths, [read_card(path) for path in paths]), flush=True)


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

    Raises:   ConfigError if the file cannot be read or is not a card of --bench.
    """
    try:
        card = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise ConfigError("RUN_OR_TRACE", path, rule, "use a file written by --card") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or too deep
        rule = f"is not JSON: {error}"
        raise ConfigError("RUN_OR_TRACE", path, rule, "use a file written by --card") from error
    if not isinstance(card, dict):
        rule = f"is not a card but a JSON {type(card).__name__}"
        raise ConfigError("RUN_OR_TRACE", path, rule, "use a file written by --card")
    if not isinstance(card.get("step_seconds"), dict) and "torchtitan" not in card:
        rule = "is not a card of --bench"
        raise ConfigError("RUN_OR_TRACE", path, rule, "use a file that --bench wrote with --card")
    return card
